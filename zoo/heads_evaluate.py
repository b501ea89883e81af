"""How far the decoding heads see ahead on the shipped held-out prompts, from one teacher-forced pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from engine.heads_config import WEIGHTS as HEADS_FILE
from engine.heads_config import read_description
from zoo import models
from zoo.evaluate import Reading
from zoo.heads import Heads
from zoo.registry import DOMAINS, HEADS, TARGET

Ranks = npt.NDArray[np.int64]

#: Trees besides the chain: candidates of head 1, 2, 3 (SmartSpec's k_1..k_3), all combinations verified.
TREES: tuple[tuple[int, ...], ...] = ((3, 2, 1), (4, 3, 2))


@dataclass(frozen=True)
class Followed:
    """One answer: ``ranks`` [heads, tokens], place of the target's token among head i's candidates when it
    was i + 1 tokens ahead; a large number where the answer had no such token.
    """

    domain: str
    ranks: Ranks


def load(directory: Path, target: LlamaForCausalLM) -> Heads:
    """Shipped heads, in float32, on the shipped target."""
    heads = Heads(target.model.embed_tokens.weight.detach())
    weight = load_file(str(directory / HEADS_FILE))["weight"].float()
    assert read_description(directory).num_heads == len(weight) == len(heads.blocks)
    with torch.no_grad():
        for parameter, value in zip(heads.parameters(), weight, strict=True):
            parameter.copy_(value)
    return heads.eval()


@torch.inference_mode()
def follow(target: LlamaForCausalLM, heads: Heads, prompt: Sequence[int], answer: Sequence[int]) -> Ranks:
    """int64 [heads, tokens] for one greedy answer, as in ``Followed``; column t is after its token t."""
    ids = torch.tensor([[*prompt, *answer]])
    hidden = target.model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    text = torch.tensor(list(answer))
    ranks = np.full((len(heads.blocks), len(answer)), np.iinfo(np.int64).max)
    for i, logits in enumerate(heads(hidden, text)):
        known = len(answer) - 1 - i  # tokens that have one i + 1 further on
        if known > 0:
            wanted = text[i + 1 :, None]
            above = logits[:known] > logits[:known].gather(1, wanted)
            ranks[i, :known] = above.sum(-1).numpy()
    return ranks


def held_by_tree(ranks: Ranks, widths: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Whether the full tree of ``widths`` has what ``ranks`` are of, bool [heads, tokens]."""
    held: npt.NDArray[np.bool_] = ranks < np.asarray(widths)[:, None]
    return held


def accepted_by_layers(right: npt.NDArray[np.bool_]) -> list[int]:
    """Accepted tokens in each verify step; the first token comes alone.

    The step after token t accepts tokens t + 1, t + 2, ... while column t of ``right`` [layers, tokens] says
    that layer 1, 2, ... of the draft made then has them.
    """
    accepted, at = [], 0
    while at < right.shape[1] - 1:
        run = int(np.cumprod(right[:, at]).sum())
        accepted.append(run)
        at += run + 1
    return accepted


def tokens_per_step(group: Iterable[npt.NDArray[np.bool_]]) -> float:
    """Tokens of answers after their first, for each of their verify steps.

    After the last token of an answer the target adds none: a step that accepts it brings what it accepts.
    Each of ``group`` is of an answer, as of ``accepted_by_layers``.
    """
    answers = list(group)
    steps = sum(len(accepted_by_layers(right)) for right in answers)
    tokens = sum(int(right.shape[1]) - 1 for right in answers)
    return round(tokens / max(steps, 1), 3)


def measure(reading: Reading, weights: Path) -> dict[str, Any]:
    """Accuracy of each head by domain, and tokens per verify step of chains and trees."""
    torch.set_num_threads(1)
    target = models.load(weights / TARGET)
    heads = load(weights / HEADS, target)
    followed = [
        Followed(prompt.domain, follow(target, heads, ids, answer))
        for prompt, ids, answer in zip(reading.prompts, reading.encoded, reading.answers, strict=True)
    ]
    groups = {domain: [one.ranks for one in followed if one.domain == domain] for domain in DOMAINS}
    return {
        "name": HEADS,
        "accuracy": {name: _accuracy(ranks) for name, ranks in _with_all(groups).items()},
        "tokens_per_step": {
            name: {
                "x".join(map(str, widths)): tokens_per_step(held_by_tree(one, widths) for one in ranks)
                for widths in ((1,) * len(heads.blocks), *TREES)
            }
            for name, ranks in _with_all(groups).items()
        },
    }


def _with_all(groups: dict[Any, list[Ranks]]) -> dict[str, list[Ranks]]:
    return {**groups, "all": [ranks for group in groups.values() for ranks in group]}


def _accuracy(group: Iterable[Ranks]) -> list[dict[str, float]]:
    """Per head the share of tokens it ranks first, and among its first three."""
    ranks = np.concatenate(list(group), axis=1)
    known = ranks < np.iinfo(np.int64).max
    return [
        {f"top{k}": round(float((row[there] < k).mean()), 4) for k in (1, 3)}
        for row, there in zip(ranks, known, strict=True)
    ]
