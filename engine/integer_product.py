"""Products with weights of integers, which are widened where they are multiplied."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch

from engine.integer_weight import IntegerWeight
from engine.tiled_product import TiledProduct, UnsuitableBlocks

# What a tensor core multiplies at once.
_LEAST_INPUTS = 16
_PAIRS_FROM = (8, 0)


class IntegerProduct(TiledProduct):
    """See `TiledProduct`."""

    def __init__(self, weight: IntegerWeight) -> None:
        """Lay out `weight`, which shares its memory.

        Raises:
            UnsuitableBlocks: if they are no tiles of the kernel's.
        """
        self.block, self.bits = weight.block, weight.bits
        least = _LEAST_INPUTS * (8 // weight.bits)  # halves of a block of four bits are multiplied apart
        if self.block < least or self.block & (self.block - 1):
            raise UnsuitableBlocks(
                f"weights of {weight.bits} bits with a scale per {self.block} of {weight.inputs} inputs: the "
                f"kernel takes powers of two from {least}; another number of ranks cuts them elsewhere"
            )
        self._tensors = tuple(part.contiguous() for part in (weight.numbers, weight.scales, weight.zeros))
        self._order = weight.order
        super().__init__(*weight.shape, weight.scales.shape[1])

    def _taken(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._order is None else x.index_select(1, self._order)

    def _kernel(self, x: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, ...], dict[str, Any]]:
        kernels: Any = importlib.import_module("engine.integer_kernels")
        constants = {
            "INPUTS": self.block,
            "BITS": self.bits,
            "IS_PACKED": x.dtype != torch.float32 and _runs_assembly(x.device),
        }
        return kernels.multiply, self._tensors, constants


@functools.cache
def _runs_assembly(device: torch.device) -> bool:
    """Whether kernels are compiled, and for GPUs that add pairs of bfloat16 numbers: from Ampere on."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _PAIRS_FROM
