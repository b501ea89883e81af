"""How far EAGLE's draft layer follows the target on the held-out prompts, from teacher-forced passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaForCausalLM

from engine.eagle_config import feature_layers
from zoo import eagle_save, models
from zoo.eagle_data import features
from zoo.eagle_model import EagleModel
from zoo.evaluate import ALL, CHAIN, Reading
from zoo.heads_evaluate import tokens_per_step
from zoo.registry import DOMAINS, EAGLE, TARGET

Right = npt.NDArray[np.bool_]


@torch.inference_mode()
def follow(
    target: LlamaForCausalLM, eagle: EagleModel, prompt: Sequence[int], answer: Sequence[int]
) -> Right:
    """bool [CHAIN, tokens] for one greedy answer: whether token t + 1 + i is layer i's first choice in a
    chain drafted after token t, had it been right so far; false where the answer has no such token.
    """
    ids = torch.tensor([[*prompt, *answer]])
    read = features(target, ids, feature_layers(target.config.num_hidden_layers))
    hidden = eagle(read, target.model.embed_tokens(ids.roll(-1, 1)), CHAIN)
    text = torch.tensor(list(answer))
    right = np.zeros((CHAIN, len(answer)), dtype=np.bool_)
    for i, states in enumerate(hidden):
        known = len(answer) - 1 - i  # tokens that have one i + 1 further on
        if known > 0:
            first = len(prompt) - 1 + i
            drafted = target.lm_head(states[0, first : first + known]).argmax(-1)
            right[i, :known] = (drafted == text[i + 1 :]).numpy()
    return right


def measure(reading: Reading, weights: Path) -> dict[str, Any]:
    """Accuracy of each layer by domain, and tokens per verify step of chains."""
    torch.set_num_threads(1)
    target = models.load(weights / TARGET)
    eagle = eagle_save.load(weights / EAGLE, EagleModel(target.config))
    groups: dict[str, list[Right]] = {domain: [] for domain in DOMAINS}
    for prompt, ids, answer in zip(reading.prompts, reading.encoded, reading.answers, strict=True):
        groups[prompt.domain].append(follow(target, eagle, ids, answer))
    named = {**groups, ALL: [right for group in groups.values() for right in group]}
    return {
        "name": EAGLE,
        "accuracy": {name: _accuracy(group) for name, group in named.items()},
        "tokens_per_step": {name: tokens_per_step(group) for name, group in named.items()},
    }


def _accuracy(group: Sequence[Right]) -> list[float]:
    """Per layer the share of tokens that it has right, if those before in its draft were."""
    shares = []
    for layer in range(CHAIN):
        known = [right[layer, : max(0, right.shape[1] - 1 - layer)] for right in group]
        shares.append(round(float(np.concatenate(known).mean()), 4))
    return shares
