"""Linear maps with weights of eight bits, which are widened where they are multiplied."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from engine.fp8 import BLOCK, Fp8Weight
from engine.linear import Linear
from engine.triton_support import runs_triton

#: Programs that keep a large GPU's memory busy, four to a processor; a weight's inputs are split for as many.
ENOUGH_PROGRAMS = 512
MOST_SPLITS = 8
#: Up to so many rows inputs are split; more have tiles enough. Up to there splits depend on the weight alone,
#: so that a token's sums are added in one order whatever is decoded beside it.
SPLIT_ROWS = 128
_SUM_BLOCK = 1024
# Least inputs per scale: what a tensor core multiplies at once.
_LEAST_BLOCK = 16
# The first GPUs that convert e4m3 themselves: Ada, Hopper.
_NATIVE_FROM = (8, 9)


class UnsuitableBlocks(ValueError):
    """Blocks that share a scale, of a size the kernel does not take; the message says which it does."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of the kernel computes: outputs by rows; warps, and tiles of inputs under way."""

    outputs: int
    rows: int
    warps: int
    stages: int


# By the compiler's code for Hopper: 4 to 7 instructions per weight and thread, none of them a spilled
# register. Few rows leave time for no more than 7 beside the memory; their tiles use `mma.sync`, whose left
# operand is widened without being packed again. Widened weights serve more rows in the larger ones.
_TILES = (Tile(64, 16, 2, 4), Tile(64, 32, 2, 4), Tile(64, 64, 4, 3), Tile(128, 128, 8, 3))
# In float32, exact and slow: all that registers, and the shared memory of smaller GPUs, have room for.
_FLOAT32_TILES = (Tile(64, 16, 2, 3), Tile(64, 32, 2, 3))


def tile_of(rows: int, dtype: torch.dtype) -> Tile:
    """The tile for a number of rows."""
    tiles = _FLOAT32_TILES if dtype == torch.float32 else _TILES
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


def num_splits(outputs: int, blocks: int) -> int:
    """In how many parts the inputs of a weight are summed, `blocks` tiles of them, for few rows."""
    wanted = ENOUGH_PROGRAMS // -(-outputs // _TILES[0].outputs)
    return max(1, min(MOST_SPLITS, wanted, blocks))


@functools.cache
def _is_native(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _NATIVE_FROM


class Fp8Product:
    """`x @ weight.T + bias + residual` in Triton, from weights of eight bits, which are never written wide.

    Rows are not rounded to eight bits: the product is that of the widened matrix, sums in float32.
    """

    def __init__(self, weight: Fp8Weight) -> None:
        """Lay out `weight`, which shares its memory.

        Raises:
            UnsuitableBlocks: if they are no tiles of the kernel's.
        """
        outputs, inputs = weight.shape
        self._numbers = weight.numbers
        self.is_blocked = weight.scales.shape[1] > 1
        block = weight.block
        if self.is_blocked and (block < _LEAST_BLOCK or block & (block - 1)):
            raise UnsuitableBlocks(
                f"FP8 weights with a scale per {block} of {inputs} inputs: the kernel takes powers of two "
                f"from {_LEAST_BLOCK}; another number of ranks cuts them elsewhere"
            )
        self.inputs_tile = min(weight.block, BLOCK) if self.is_blocked else BLOCK
        if self.inputs_tile < weight.block and self.is_blocked:
            weight = weight.divided(self.inputs_tile)
        self.group, self._scales = _grouped(weight.scales)
        self.blocks = -(-inputs // self.inputs_tile)
        self.splits = num_splits(outputs, self.blocks)
        self.outputs, self.inputs = outputs, inputs

    def splits_for(self, rows: int) -> int:
        """In how many parts the inputs are summed for a number of rows."""
        return self.splits if rows <= SPLIT_ROWS else 1

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        *,
        tile: Tile | None = None,
        splits: int | None = None,
    ) -> torch.Tensor:
        """[rows, outputs] for `x` [rows, inputs], `bias` [outputs] and `residual` [rows, outputs], floats.

        `tile` and `splits` are by default those for so many rows; others are for a search for faster ones.
        """
        kernels: Any = importlib.import_module("engine.fp8_kernels")
        rows = x.shape[0]
        tile = tile_of(rows, x.dtype) if tile is None else tile
        splits = self.splits_for(rows) if splits is None else splits
        out = torch.empty(rows, self.outputs, dtype=x.dtype, device=x.device)
        if not rows:
            return out
        if x.stride(1) != 1:
            x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        has = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
        into = out if splits == 1 else x.new_empty(splits, rows, self.outputs, dtype=torch.float32)
        # Absent ones are never read.
        added = (out if bias is None else bias, out if residual is None else residual)
        kernels.multiply[-(-rows // tile.rows), -(-self.outputs // tile.outputs), splits](
            x,
            self._numbers,
            self._scales,
            *added,
            into,
            rows,
            self.outputs,
            self.inputs,
            x.stride(0),
            -(-self.blocks // splits),
            OUTPUTS=tile.outputs,
            ROWS=tile.rows,
            INPUTS=self.inputs_tile,
            GROUP=self.group,
            IS_BLOCKED=self.is_blocked,
            IS_NATIVE=_is_native(x.device),
            IS_SPLIT=splits > 1,
            **has,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            size = rows * self.outputs
            kernels.add_splits[(-(-size // _SUM_BLOCK),)](
                into, *added, out, size, self.outputs, SPLITS=splits, BLOCK=_SUM_BLOCK, **has, num_warps=4
            )
        return out


def _grouped(scales: torch.Tensor) -> tuple[int, torch.Tensor]:
    """`BLOCK` if so many neighbouring outputs share their scales everywhere, else 1; and one for each."""
    outputs, blocks = scales.shape
    if outputs % BLOCK == 0:
        groups = scales.view(-1, BLOCK, blocks)
        if bool((groups == groups[:, :1]).all()):
            return BLOCK, groups[:, 0].contiguous()
    return 1, scales.contiguous()


class Fp8Linear:
    """As `engine.linear.Linear`, with a weight of eight bits that stays so, on GPUs with Triton.

    Attributes:
        gain: [inputs], what `x` is to be multiplied by before the call; None for nothing. It cannot be part
            of numbers of eight bits, and the norm before multiplies by it for nothing.
    """

    def __init__(
        self,
        weight: Fp8Weight,
        bias: torch.Tensor | None,
        scale: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """Lay out `weight` for rows of `dtype`, with `bias` [outputs] and `scale` [inputs]."""
        self.gain = None if scale is None else scale.to(weight.device, dtype)
        self._bias = bias
        self._product = Fp8Product(weight)

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
    weight: torch.Tensor | Fp8Weight,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Linear | Fp8Linear:
    """The map `(x * scale) @ weight.T + bias` for rows of `dtype`.

    Where no kernel takes weights of eight bits they are widened.
    """
    if not isinstance(weight, Fp8Weight):
        return Linear(weight, bias, scale)
    if runs_triton(weight.device):
        return Fp8Linear(weight, bias, scale, dtype)
    return Linear(weight.dequantized(dtype), bias, scale)
