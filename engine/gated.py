"""The gate of a feed-forward layer: SiLU times what it gates, by torch in two kernels, by Triton in one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F

_BLOCK = 1024


class Gate:
    """[rows, units] of gates and what they gate, [rows, 2 * units], gates first."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """May overwrite `gate_up`."""
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate).mul_(up)


class TritonGate(Gate):
    """The same in one launch, and rounded once."""

    def __init__(self) -> None:
        """Where Triton can serve, see `engine.triton_support.why_not_triton`."""
        self._kernels: Any = importlib.import_module("engine.triton_kernels")

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Gate`."""
        rows, units = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, units, dtype=gate_up.dtype, device=gate_up.device)
        self._kernels.gate[rows, -(-units // _BLOCK)](gate_up, out, units, BLOCK=_BLOCK, num_warps=4)
        return out
