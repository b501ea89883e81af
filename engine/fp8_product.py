"""Products with weights of eight bits, e4m3 numbers, which are widened where they are multiplied."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from engine.fp8 import BLOCK, Fp8Weight
from engine.tiled_product import INPUTS_TILE, TiledProduct, UnsuitableBlocks

# Least inputs per scale: what a tensor core multiplies at once.
_LEAST_BLOCK = 16
# The first GPUs that convert e4m3 themselves: Ada, Hopper.
_NATIVE_FROM = (8, 9)


@functools.cache
def _is_native(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _NATIVE_FROM


class Fp8Product(TiledProduct):
    """See `TiledProduct`.

    Attributes:
        numbers, scales: of the weight, as `fp8_kernels.multiply` takes them.
        group: neighbouring outputs that share scales.
        is_blocked: whether an output has several scales, one per `inputs_tile` of its inputs.
        inputs_tile: inputs that the kernel takes at a time.
    """

    def __init__(self, weight: Fp8Weight) -> None:
        """Lay out `weight`, which shares its memory.

        Raises:
            UnsuitableBlocks: if they are no tiles of the kernel's.
        """
        outputs, inputs = weight.shape
        self.numbers = weight.numbers
        self.is_blocked = weight.scales.shape[1] > 1
        block = weight.block
        if self.is_blocked and (block < _LEAST_BLOCK or block & (block - 1)):
            raise UnsuitableBlocks(
                f"FP8 weights with a scale per {block} of {inputs} inputs: the kernel takes powers of two "
                f"from {_LEAST_BLOCK}; another number of ranks cuts them elsewhere"
            )
        self.inputs_tile = min(block, INPUTS_TILE) if self.is_blocked else INPUTS_TILE
        if self.inputs_tile < block and self.is_blocked:
            weight = weight.divided(self.inputs_tile)
        self.group, self.scales = _grouped(weight.scales)
        super().__init__(outputs, inputs, -(-inputs // self.inputs_tile))

    def _kernel(self, x: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, ...], dict[str, Any]]:
        kernels: Any = importlib.import_module("engine.fp8_kernels")
        return kernels.multiply, (self.numbers, self.scales), {"INPUTS": self.inputs_tile, **self.constants}

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are to know of the scales, and of the device."""
        device = self.numbers.device
        return {"GROUP": self.group, "IS_BLOCKED": self.is_blocked, "IS_NATIVE": _is_native(device)}


def _grouped(scales: torch.Tensor) -> tuple[int, torch.Tensor]:
    """`BLOCK` if so many neighbouring outputs share their scales everywhere, else 1; and one for each."""
    outputs, blocks = scales.shape
    if outputs % BLOCK == 0:
        groups = scales.view(-1, BLOCK, blocks)
        if bool((groups == groups[:, :1]).all()):
            return BLOCK, groups[:, 0].contiguous()
    return 1, scales.contiguous()
