"""Parts of weight matrices, of floats or of eight bits alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.fp8 import Fp8Weight, concatenated
from engine.fp8_module import StoredFp8Linear

Weight = torch.Tensor | Fp8Weight
"""[outputs, inputs]."""


def weight_of(linear: Any) -> Weight:
    """The matrix of a Transformers model's linear layer."""
    if isinstance(linear, StoredFp8Linear):
        return linear.of_eight_bits
    weight: torch.Tensor = linear.weight
    return weight


def rows(weight: Weight, which: slice | torch.Tensor) -> Weight:
    """Some outputs, by a range or by numbers."""
    return weight.rows(which) if isinstance(weight, Fp8Weight) else weight[which]


def columns(weight: Weight, start: int, stop: int) -> Weight:
    """The inputs from `start` to `stop`."""
    return weight.columns(start, stop) if isinstance(weight, Fp8Weight) else weight[:, start:stop]


def joined(weights: Sequence[Weight]) -> Weight:
    """Matrices of the same inputs, one's outputs after the other's; as floats unless all have eight bits."""
    of_eight_bits = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    if len(of_eight_bits) == len(weights):
        return concatenated(of_eight_bits)
    dtype = next(weight.dtype for weight in weights if isinstance(weight, torch.Tensor))
    return torch.cat([w.dequantized(dtype) if isinstance(w, Fp8Weight) else w for w in weights])
