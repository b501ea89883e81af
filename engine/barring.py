"""Tokens that a request rules out: all but those it allows, and the ends of its bad words."""

from __future__ import annotations

import math
from collections import OrderedDict
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
    index = _index_of(allowed, logits.shape[1], logits.device)
    if not len(index):
        return
    line = logits[row]
    kept = line.index_select(0, index)
    line.fill_(-math.inf).index_copy_(0, index, kept)


# Of the requests seen last: every row of every step has the same ids, and they may be a whole vocabulary.
_MOST_KEPT = 64
_kept: OrderedDict[tuple[int, int, torch.device], tuple[Sequence[int], torch.Tensor]] = OrderedDict()


def _index_of(allowed: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """int64 [ids], those in the vocabulary; made once for each sequence of ids, which is not changed."""
    place = (id(allowed), vocab_size, device)
    known = _kept.get(place)
    if known is None or known[0] is not allowed:
        ids = [token for token in allowed if 0 <= token < vocab_size]
        known = _kept[place] = (allowed, to_device(torch.tensor(ids, dtype=torch.int64), device))
        if len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
    return known[1]


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
