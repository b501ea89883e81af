"""Truncation of distributions in place: min-p, top-k, top-p over rows of logits.

Every cut is a threshold on the value: tokens that tie with the last one kept are kept too (as vLLM's and
Transformers' top-k do), so that the outcome depends on no sort's treatment of ties. The most probable
token always survives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.devices import to_device

_NUCLEUS_GUESSES = (64, 512)


def min_p_(logits: torch.Tensor, min_p: Sequence[float]) -> None:
    """Drop tokens less probable than `min_p` times the most probable one (arXiv 2407.01082).

    Args:
        logits: float32 [n, vocab], changed in place; dropped tokens become -inf.
        min_p: n values in (0, 1].
    """
    log_min_p = to_device(torch.tensor([math.log(p) for p in min_p], dtype=logits.dtype), logits.device)
    _cut(logits, logits.amax(dim=-1, keepdim=True) + log_min_p.unsqueeze(1))


def top_k_(logits: torch.Tensor, top_k: Sequence[int]) -> None:
    """Keep the `top_k` most probable tokens of each row (and ties of the last).

    Args:
        logits: float32 [n, vocab], changed in place; dropped tokens become -inf.
        top_k: n values, 1 <= top_k <= vocab.
    """
    best = logits.topk(max(top_k), dim=-1).values
    last = to_device(torch.tensor(top_k), logits.device).unsqueeze(1) - 1
    _cut(logits, best.gather(1, last))


def top_p_(logits: torch.Tensor, top_p: Sequence[float], *, may_wait: bool = True) -> None:
    """Keep the smallest set of most probable tokens that holds `top_p` of the mass (arXiv 1904.09751).

    Args:
        logits: float32 [n, vocab], changed in place; dropped tokens become -inf.
        top_p: n values in [0, 1).
        may_wait: whether the host may wait for the device to see how large a nucleus is. If not, whole rows
            are sorted.
    """
    wanted = to_device(torch.tensor(top_p, dtype=logits.dtype), logits.device).unsqueeze(1)
    vocab = logits.shape[1]
    log_mass = logits.logsumexp(dim=-1, keepdim=True)
    if not may_wait:
        ordered = logits.sort(dim=-1, descending=True).values
        mass = (ordered - log_mass).exp_().cumsum(dim=-1)
        last = (mass < wanted).sum(dim=-1, keepdim=True)
        _cut(logits, ordered.gather(1, last.clamp_(max=vocab - 1)))
        return
    threshold = torch.full_like(wanted, -math.inf)
    # A nucleus is nearly always small, and whole rows are slow to sort: try heads of growing size.
    rows = torch.arange(len(logits), device=logits.device)
    for size in (*(guess for guess in _NUCLEUS_GUESSES if guess < vocab), vocab):
        part = logits if len(rows) == len(logits) else logits[rows]
        head = part.topk(size, dim=-1).values
        mass = (head - log_mass[rows]).exp_().cumsum(dim=-1)
        # A token is kept while the mass before it is still below what is wanted.
        last = (mass < wanted[rows]).sum(dim=-1, keepdim=True)
        found = last[:, 0] < size
        threshold[rows[found]] = head.gather(1, last.clamp_(max=size - 1))[found]
        rows = rows[~found]
        if len(rows) == 0:
            break
    _cut(logits, threshold)


def _cut(logits: torch.Tensor, threshold: torch.Tensor) -> None:
    logits.masked_fill_(logits < threshold, -math.inf)
