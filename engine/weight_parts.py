"""Parts of weight matrices, of floats or quantized alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine import fp8, integer_weight
from engine.fp8 import Fp8Weight
from engine.integer_weight import IntegerWeight
from engine.quantized_linear import QuantizedWeight
from engine.stored_linear import StoredLinear

Weight = torch.Tensor | QuantizedWeight
"""[outputs, inputs]."""


def weight_of(linear: Any) -> Weight:
    """The matrix of a Transformers model's linear layer."""
    if isinstance(linear, StoredLinear):
        return linear.matrix
    weight: torch.Tensor = linear.weight
    return weight


def rows(weight: Weight, which: slice | torch.Tensor) -> Weight:
    """Some outputs, by a range or by numbers."""
    return weight[which] if isinstance(weight, torch.Tensor) else weight.rows(which)


def columns(weight: Weight, start: int, stop: int, dtype: torch.dtype) -> Weight:
    """The inputs from `start` to `stop`; of floats of `dtype` where columns do not follow each other."""
    if isinstance(weight, IntegerWeight) and weight.order is not None and stop - start < weight.inputs:
        weight = weight.dequantized(dtype)
    return weight[:, start:stop] if isinstance(weight, torch.Tensor) else weight.columns(start, stop)


def joined(weights: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Matrices of the same inputs, one's outputs after the other's; of floats unless all are alike."""
    of_eight_bits = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    if len(of_eight_bits) == len(weights):
        return fp8.concatenated(of_eight_bits)
    of_integers = [weight for weight in weights if isinstance(weight, IntegerWeight)]
    if len(of_integers) == len(weights) and all(map(of_integers[0].has_order_of, of_integers)):
        return integer_weight.concatenated(of_integers)
    return torch.cat([widened(weight, dtype) for weight in weights])


def widened(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix as floats of `dtype`, in which those of floats are."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantized(dtype)
