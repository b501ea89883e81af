"""The gate of a feed-forward layer: SiLU times what it gates, by torch in two kernels, by Triton in one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from engine.norms import PendingNorm, norm_arguments, norm_block

_BLOCK = 1024


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, units] of gates and what they gate, [rows, 2 * units], gates first; may overwrite it."""
    gates, up = gate_up.chunk(2, dim=1)
    return F.silu(gates).mul_(up)


def gate_by_triton(gate_up: torch.Tensor, norm: PendingNorm | None = None) -> torch.Tensor:
    """`gate` in one launch, and rounded once, where Triton can serve (`engine.triton_support`).

    `norm` is applied to `gate_up` before.
    """
    kernels: Any = importlib.import_module("engine.row_kernels")
    rows, units = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, units, dtype=gate_up.dtype, device=gate_up.device)
    kernels.gate[rows, -(-units // _BLOCK)](
        gate_up,
        out,
        units,
        *norm_arguments(norm, gate_up),
        BLOCK=_BLOCK,
        NORM_BLOCK=norm_block(norm),
        num_warps=4,
    )
    return out
