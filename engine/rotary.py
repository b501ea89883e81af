"""Rotary position embeddings: the factors, the layout of heads, and applying them in place."""

from __future__ import annotations

from typing import Any

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


def paired(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`weight` [heads * head_dim, ...] with the two coordinates that a rotary pair mixes as neighbours.

    Queries and keys are reordered alike, which leaves their products as they were.
    """
    pairs: torch.Tensor = weight.unflatten(0, (-1, 2, head_dim // 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def rotation_table(rotary: Any, max_tokens: int, device: torch.device) -> torch.Tensor:
    """complex64 [max_tokens, 1, head_dim / 2], rotary factor of each position and pair.

    `rotary` is the rotary embedding of a Transformers model, of which angles depend on positions alone; the
    same is computed here, to the bit.
    """
    positions = torch.arange(max_tokens, dtype=torch.float32, device=device)
    angles = positions[:, None] * rotary.inv_freq.float().to(device)
    scaling = float(rotary.attention_scaling)
    return torch.complex(angles.cos() * scaling, angles.sin() * scaling).unsqueeze(1)
