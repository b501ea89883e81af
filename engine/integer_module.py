"""Linear layers of Transformers models with weights of integers."""

from __future__ import annotations

import torch
from torch import nn

from engine.integer_weight import IntegerWeight
from engine.stored_linear import StoredLinear


class StoredIntegerLinear(StoredLinear):
    """See `StoredLinear`.

    Attributes:
        numbers, scales, zeros, order: as `IntegerWeight` has them.
    """

    order: torch.Tensor | None

    def __init__(self, weight: IntegerWeight, bias: torch.Tensor | None) -> None:
        """Hold `weight`."""
        super().__init__(weight.shape, bias)
        self._bits = weight.bits
        self.numbers = nn.Parameter(weight.numbers, requires_grad=False)
        self.scales = nn.Parameter(weight.scales, requires_grad=False)
        self.zeros = nn.Parameter(weight.zeros, requires_grad=False)
        self.order = None if weight.order is None else nn.Parameter(weight.order, requires_grad=False)

    @property
    def matrix(self) -> IntegerWeight:
        """The weight."""
        return IntegerWeight(self.numbers, self.scales, self.zeros, self.in_features, self._bits, self.order)
