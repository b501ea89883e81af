"""Linear layers of Transformers models whose weights stay as quantized as their checkpoint has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from engine.quantized_linear import QuantizedWeight, product_of
from engine.tiled_product import TiledProduct
from engine.triton_support import runs_triton


class StoredLinear(nn.Module, ABC):
    """`torch.nn.Linear` with a quantized weight, multiplied without rounding rows.

    What it holds are parameters, since what a model weighs is asked of those; they cannot be trained.

    Attributes:
        out_features, in_features: as of `torch.nn.Linear`.
        bias: [outputs], or None.
        is_widened: multiply by torch with the widened matrix, even where a kernel takes quantized ones.
    """

    bias: torch.Tensor | None

    def __init__(self, shape: tuple[int, int], bias: torch.Tensor | None) -> None:
        """With a weight of `shape`, (outputs, inputs)."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.is_widened = False
        self._product: TiledProduct | None = None

    @property
    @abstractmethod
    def matrix(self) -> QuantizedWeight:
        """The weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., outputs] for `x` [..., inputs]."""
        if self.is_widened or not runs_triton(x.device):
            weight = self.matrix.to(x.device)  # from the host, where it does not fit beside a runner
            bias = None if self.bias is None else self.bias.to(x.device)
            return F.linear(x, weight.dequantized(x.dtype), bias)
        if self._product is None:
            self._product = product_of(self.matrix)
        rows = self._product(x.reshape(-1, x.shape[-1]), self.bias)
        return rows.view(*x.shape[:-1], rows.shape[1])


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Lets a model multiply with widened matrices meanwhile: slowly, and by none of our kernels."""
    layers = [module for module in model.modules() if isinstance(module, StoredLinear)]
    for layer in layers:
        layer.is_widened = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_widened = False


def widen_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Put layers of floats, of `dtype`, in the place of a model's `StoredLinear`: of the same numbers."""
    for parent, name, child in layers_of(model):
        if not isinstance(child, StoredLinear):
            continue
        setattr(parent, name, plain_linear(child.matrix.dequantized(dtype), child.bias))


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A layer with a weight [outputs, inputs] and a bias [outputs], in the weight's type."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
    return layer


def layers_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """All modules, with whose they are and their names there."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
