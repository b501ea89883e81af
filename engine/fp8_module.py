"""Linear layers of Transformers models with weights of eight bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from engine.fp8 import BLOCK, Fp8Weight, quantized, stored
from engine.fp8_linear import Fp8Product
from engine.triton_support import runs_triton


class StoredFp8Linear(nn.Module):
    """`torch.nn.Linear` with a weight of eight bits as checkpoints have it, multiplied without rounding rows.

    Attributes:
        weight: float8_e4m3fn [outputs, inputs].
        scale: floats, as `engine.fp8.stored` takes them.
        bias: [outputs], or None.
        is_widened: multiply by torch with the widened matrix, even where a kernel takes eight bits.
    """

    bias: torch.Tensor | None

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
        super().__init__()
        stored(weight.to("meta"), scale.to("meta"), block)  # says what is wrong
        self._block = block
        self._product: Fp8Product | None = None
        self.is_widened = False
        # Parameters, since what a model weighs is asked of those; they cannot be trained.
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def of_eight_bits(self) -> Fp8Weight:
        """The matrix."""
        return stored(self.weight, self.scale, self._block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., outputs] for `x` [..., inputs]."""
        if self.is_widened or not runs_triton(x.device):
            weight = self.of_eight_bits.to(x.device)  # from the host, where it does not fit beside a runner
            bias = None if self.bias is None else self.bias.to(x.device)
            return F.linear(x, weight.dequantized(x.dtype), bias)
        if self._product is None:
            self._product = Fp8Product(self.of_eight_bits)
        rows = self._product(x.reshape(-1, x.shape[-1]), self.bias)
        return rows.view(*x.shape[:-1], rows.shape[1])


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Lets a model multiply with widened matrices meanwhile: slowly, and by none of our kernels."""
    layers = [module for module in model.modules() if isinstance(module, StoredFp8Linear)]
    for layer in layers:
        layer.is_widened = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_widened = False


def quantize_linears(
    model: nn.Module, *, keep: nn.Module | None = None, device: torch.device | None = None
) -> int:
    """Put `StoredFp8Linear` in the place of a model's linear layers, but of `keep`; returns of how many.

    What the model computes afterwards is what it is: another model than before. Each weight is rounded on
    `device`, where it is by default, and stays where it was.
    """
    layers = [found for found in _layers(model, nn.Linear) if found[2] is not keep]
    for parent, name, child in layers:
        weight = quantized(child.weight.detach().to(device)).to(child.weight.device)
        # One scale per output and block would be stored 128 times.
        scales = weight.scales[::BLOCK].contiguous()
        numbers = weight.numbers.view(torch.float8_e4m3fn)
        setattr(parent, name, StoredFp8Linear(numbers, scales, child.bias))
    return len(layers)


def widen_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Put layers of floats, of `dtype`, in the place of a model's `StoredFp8Linear`: of the same numbers."""
    for parent, name, child in _layers(model, StoredFp8Linear):
        outputs, inputs = child.weight.shape
        layer = nn.Linear(inputs, outputs, bias=child.bias is not None, device="meta")
        layer.weight = nn.Parameter(child.of_eight_bits.dequantized(dtype), requires_grad=False)
        if child.bias is not None:
            layer.bias = nn.Parameter(child.bias.detach().to(dtype), requires_grad=False)
        setattr(parent, name, layer)


Layer = TypeVar("Layer", bound=nn.Module)


def _layers(model: nn.Module, kind: type[Layer]) -> list[tuple[nn.Module, str, Layer]]:
    """The modules of exactly that class, with whose they are and their names there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is kind
    ]
