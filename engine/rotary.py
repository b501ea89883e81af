"""Rotary position embeddings of the heads of a row, in place."""

from __future__ import annotations

import torch


def rotate(qkv: torch.Tensor, rotation: torch.Tensor, heads: int, head_dim: int) -> None:
    """Apply rotary embeddings in place to the first `heads` heads of `qkv` [rows, width].

    `rotation` complex64 [rows, 1, head_dim / 2]; the two halves of each rotated pair are neighbours here.
    """
    part = qkv[:, : heads * head_dim]
    if qkv.dtype == torch.float32:
        pairs = part.view(-1, heads, head_dim // 2, 2)
        torch.view_as_complex(pairs).mul_(rotation)
        return
    pairs = part.float().view(-1, heads, head_dim // 2, 2)
    torch.view_as_complex(pairs).mul_(rotation)
    part.copy_(pairs.view(part.shape))
