"""Linear layers of Transformers models with weights of eight bits, e4m3 numbers."""

from __future__ import annotations

import torch
from torch import nn

from engine.fp8 import BLOCK, Fp8Weight, stored
from engine.stored_linear import StoredLinear


class StoredFp8Linear(StoredLinear):
    """See `StoredLinear`.

    Attributes:
        weight: float8_e4m3fn [outputs, inputs].
        scale: floats, as `engine.fp8.stored` takes them.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        block: tuple[int, int] = (BLOCK, BLOCK),
    ) -> None:
        """Take them as they are.

        Raises:
            ValueError: if they do not belong together.
        """
        # Says what is wrong.
        super().__init__(stored(weight.to("meta"), scale.to("meta"), block).shape, bias)
        self._block = block
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    @property
    def matrix(self) -> Fp8Weight:
        """The weight."""
        return stored(self.weight, self.scale, self._block)
