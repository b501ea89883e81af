"""Attention whose scores PyTorch's own does not have: capped ones (Gemma 2), and sinks (gpt-oss)."""

from __future__ import annotations

import torch

from engine.attention import PaddedAttention
from engine.scoring import Scoring

# Scores of so many bytes at a time, whatever the rows of a prompt and the keys they see.
SCORE_BYTES = 64 << 20


class ScoredAttention(PaddedAttention):
    """`PaddedAttention` that computes scores step by step; windows are in what is planned."""

    def __init__(self, num_slots: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(num_slots, dtype=dtype, device=device)
        self._scoring: dict[int, Scoring] = {}

    def set_scoring(self, layer: int, scoring: Scoring) -> None:
        """See `PaddedAttention`."""
        self._scoring[layer] = scoring

    def _weighted(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        _, softcap, sinks = self._scoring[layer]
        lines, kv_heads, rows, dim = q.shape
        scale, keys = dim**-0.5 if scale is None else scale, k.transpose(2, 3)
        sink = None
        if sinks is not None:
            by_head = sinks.view(kv_heads, 1, -1)
            # Rows of a key head are those of its query heads, in turn.
            sink = (
                by_head.expand(kv_heads, rows // by_head.shape[2], -1).reshape(1, kv_heads, rows, 1).float()
            )
        out = q.new_empty(lines, kv_heads, rows, v.shape[3])
        step = max(1, SCORE_BYTES // (4 * lines * kv_heads * k.shape[2]))
        for first in range(0, rows, step):
            part = slice(first, first + step)
            scores = (q[:, :, part] @ keys).float().mul_(scale)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            if mask is not None:
                scores.add_(mask if mask.shape[2] == 1 else mask[:, :, part])
            highest = scores.amax(dim=3, keepdim=True)
            if sink is not None:
                highest = torch.maximum(highest, sink[:, :, part])
            scores.sub_(highest).exp_()
            total = scores.sum(dim=3, keepdim=True)
            if sink is not None:
                total += (sink[:, :, part] - highest).exp()
            out[:, :, part] = scores.div_(total).to(v.dtype) @ v
        return out
