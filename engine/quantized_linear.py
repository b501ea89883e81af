"""Linear maps with quantized weights, which are widened where they are multiplied."""

from __future__ import annotations

import torch

from engine.fp8 import Fp8Weight
from engine.fp8_product import Fp8Product
from engine.integer_product import IntegerProduct
from engine.integer_weight import IntegerWeight
from engine.linear import Linear
from engine.tiled_product import TiledProduct
from engine.triton_support import runs_triton

QuantizedWeight = Fp8Weight | IntegerWeight
"""[outputs, inputs], of numbers of few bits."""


def product_of(weight: QuantizedWeight) -> TiledProduct:
    """What multiplies rows with a weight, on GPUs with Triton.

    Raises:
        UnsuitableBlocks: if the kernel does not take its blocks.
    """
    return Fp8Product(weight) if isinstance(weight, Fp8Weight) else IntegerProduct(weight)


class QuantizedLinear:
    """As `engine.linear.Linear`, with a weight that stays quantized, on GPUs with Triton.

    Attributes:
        gain: [inputs], what `x` is to be multiplied by before the call; None for nothing. It cannot be part
            of numbers of few bits, and the norm before multiplies by it for nothing.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        scale: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """Lay out `weight` for rows of `dtype`, with `bias` [outputs] and `scale` [inputs]."""
        self.gain = None if scale is None else scale.to(weight.device, dtype)
        self._bias = bias
        self._product = product_of(weight)

    @property
    def is_homogeneous(self) -> bool:
        """Whether the product with a multiple of `x` is that multiple of the product."""
        return self._bias is None and self.gain is None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, outputs] for `x` [rows, inputs]."""
        return self._product(x, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `engine.linear.Linear`; here `residual` is read where it lies, and stays."""
        return self._product(x, self._bias, residual)


def make_linear(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Linear | QuantizedLinear:
    """The map `(x * scale) @ weight.T + bias` for rows of `dtype`.

    Where no kernel takes quantized weights they are widened.
    """
    if isinstance(weight, torch.Tensor):
        return Linear(weight, bias, scale)
    if runs_triton(weight.device):
        return QuantizedLinear(weight, bias, scale, dtype)
    return Linear(weight.dequantized(dtype), bias, scale)
