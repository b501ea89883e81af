"""Tokens that a request rules out: all but those it allows, and the ends of its bad words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.devices import to_device


def allow_only_(logits: torch.Tensor, row: int, allowed: Sequence[int]) -> None:
    """Bar every token of a row that is not in `allowed`; ids outside the vocabulary are ignored.

    Args:
        logits: float32 [n, vocab], changed in place; barred tokens become -inf.
        row: which.
        allowed: token ids; if none of them is in the vocabulary (of a drafter), nothing is barred.
    """
    ids = [token for token in allowed if 0 <= token < logits.shape[1]]
    if not ids:
        return
    index = to_device(torch.tensor(ids), logits.device)
    line = logits[row]
    kept = line.index_select(0, index)
    line.fill_(-math.inf).index_copy_(0, index, kept)


def bar_(logits: torch.Tensor, row: int, tokens: Sequence[int]) -> None:
    """Bar tokens of a row; arguments as of `allow_only_`."""
    ids = [token for token in tokens if 0 <= token < logits.shape[1]]
    if ids:
        logits[row].index_fill_(0, to_device(torch.tensor(ids), logits.device), -math.inf)


def ends_of_bad_words(
    bad_words: Sequence[Sequence[int]], output: Sequence[int], path: Sequence[int] = ()
) -> list[int]:
    """Tokens that would complete a bad word after `output` and `path` (as vLLM's `bad_words`).

    Args:
        bad_words: token sequences, none empty.
        output: tokens generated so far. path: more of them, along a path of a tree.
    """
    longest = max((len(word) for word in bad_words), default=1) - 1
    before = (*output[max(0, len(output) - longest) :], *path)
    return [
        word[-1]
        for word in bad_words
        if len(word) == 1 or (len(before) >= len(word) - 1 and before[-(len(word) - 1) :] == tuple(word[:-1]))
    ]
