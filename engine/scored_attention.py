"""Attention whose scores PyTorch's own does not have: capped ones (Gemma 2), and sinks (gpt-oss)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.attention import PaddedAttention


class Scoring(NamedTuple):
    """What a layer does with its scores besides scaling them.

    Attributes:
        softcap: bound on them, `softcap * tanh(score / softcap)`; None for none.
        sinks: float [heads], for each head one more score that takes its share of the softmax and gives
            nothing; None for none.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None


class ScoredAttention(PaddedAttention):
    """`PaddedAttention` that computes scores step by step.

    Attributes:
        scoring: of each layer, set before it attends.
    """

    def __init__(self, num_slots: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(num_slots, dtype=dtype, device=device)
        self.scoring: dict[int, Scoring] = {}

    def _weighted(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        softcap, sinks = self.scoring[layer]
        scores = (q @ k.transpose(2, 3)).float() * (q.shape[3] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores + mask
        if sinks is None:
            return scores.softmax(dim=3).to(v.dtype) @ v
        kv_heads, rows = q.shape[1], q.shape[2]
        by_head = sinks.view(kv_heads, 1, -1)
        # Rows of a key head are those of its query heads, in turn.
        sink = by_head.expand(kv_heads, rows // by_head.shape[2], -1).reshape(1, kv_heads, rows, 1).float()
        highest = torch.maximum(scores.amax(dim=3, keepdim=True), sink)
        weights = (scores - highest).exp()
        share = weights / (weights.sum(dim=3, keepdim=True) + (sink - highest).exp())
        return share.to(v.dtype) @ v
