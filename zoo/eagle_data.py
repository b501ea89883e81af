"""What EAGLE's draft layer learns from: the target's own answers, one a row, and its hidden states there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaForCausalLM

from zoo.dataset import like_length
from zoo.registry import Domain
from zoo.scored import Scored

#: What it is taught: shares of the response tokens, as of the drafter for everything.
DIET: dict[Domain, float] = {"code": 0.4, "chat": 0.35, "summary": 0.25}


@dataclass(frozen=True)
class EagleBatch:
    """``ids`` int64 [rows, tokens], padded behind; ``where`` flat positions t at which something is to learn,
    and of what the target decided at each t + 1 ``top_ids`` int64 and ``top_logp`` float32 [n, TOP].
    """

    ids: npt.NDArray[np.int64]
    where: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int64]
    top_logp: npt.NDArray[np.float32]


def batches(scored: Scored, rows: int, seed: int) -> Iterator[EagleBatch]:
    """Endless batches of whole sequences, pass after pass."""
    before = np.concatenate([[0], np.cumsum(scored.tokens.answer, dtype=np.int64)])
    for chosen in like_length(scored.tokens, DIET, rows, np.random.default_rng(seed)):
        yield _batch(scored, chosen, before)


def _batch(scored: Scored, chosen: npt.NDArray[np.int64], before: npt.NDArray[np.int64]) -> EagleBatch:
    tokens = scored.tokens
    spans = [np.arange(tokens.starts[i], tokens.starts[i + 1]) for i in chosen]
    longest = max(map(len, spans))
    ids = np.zeros((len(spans), longest), np.int64)
    where, index = [], []
    for row, span in enumerate(spans):
        ids[row, : len(span)] = tokens.ids[span]
        # The draft after the first response token is of the second: position t has read the token at t + 1.
        drafted = np.flatnonzero(tokens.answer[span] > 0)[1:]
        where.append(row * longest + drafted - 2)
        index.append(before[span[drafted]])
    found = np.concatenate(index)
    return EagleBatch(
        ids,
        np.concatenate(where),
        scored.top_ids[found].astype(np.int64),
        scored.top_logp[found].astype(np.float32),
    )


@torch.inference_mode()
def features(target: LlamaForCausalLM, ids: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    """[rows, tokens, len(layers) * width]: hidden states that enter the target's ``layers``."""
    # Padding lies to the right, where causal attention never looks from.
    states = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in layers], -1)
