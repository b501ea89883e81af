"""Products of rows with quantized weights, by tiles and splits: what their kernels have in common."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

#: Most inputs of a tile: how far apart scales usually are.
INPUTS_TILE = 128
#: Programs that keep a large GPU's memory busy, four to a processor; a weight's inputs are split for as many.
ENOUGH_PROGRAMS = 512
MOST_SPLITS = 8
#: Up to so many rows inputs are split; more have tiles enough. Up to there splits depend on the weight alone,
#: so that a token's sums are added in one order whatever is decoded beside it.
SPLIT_ROWS = 128
_SUM_BLOCK = 1024


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


class TiledProduct(ABC):
    """`x @ weight.T + bias + residual` in Triton, from a quantized weight, which is never written wide.

    Rows are not rounded: the product is that of the widened matrix, sums in float32.

    Attributes:
        outputs, inputs: of the weight.
        blocks: tiles of its inputs.
        splits: in how many parts these are summed for few rows.
    """

    def __init__(self, outputs: int, inputs: int, blocks: int) -> None:
        """For a weight of this shape."""
        self.outputs, self.inputs, self.blocks = outputs, inputs, blocks
        self.splits = num_splits(outputs, blocks)

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
        rows = x.shape[0]
        tile = tile_of(rows, x.dtype) if tile is None else tile
        splits = self.splits_for(rows) if splits is None else splits
        out = torch.empty(rows, self.outputs, dtype=x.dtype, device=x.device)
        if not rows:
            return out
        x = self._taken(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        has = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
        into = out if splits == 1 else x.new_empty(splits, rows, self.outputs, dtype=torch.float32)
        # Absent ones are never read.
        added = (out if bias is None else bias, out if residual is None else residual)
        grid = (-(-rows // tile.rows), -(-self.outputs // tile.outputs), splits)
        multiply, weight, constants = self._kernel(x)
        multiply[grid](
            x,
            *weight,
            *added,
            into,
            rows,
            self.outputs,
            self.inputs,
            x.stride(0),
            -(-self.blocks // splits),
            OUTPUTS=tile.outputs,
            ROWS=tile.rows,
            IS_SPLIT=splits > 1,
            **constants,
            **has,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            size = rows * self.outputs
            sums: Any = importlib.import_module("engine.product_kernels")
            sums.add_splits[(-(-size // _SUM_BLOCK),)](
                into, *added, out, size, self.outputs, SPLITS=splits, BLOCK=_SUM_BLOCK, **has, num_warps=4
            )
        return out

    def _taken(self, x: torch.Tensor) -> torch.Tensor:
        """Rows as the kernel takes them, [rows, inputs]."""
        return x

    @abstractmethod
    def _kernel(self, x: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, ...], dict[str, Any]]:
        """The kernel for rows like `x`, the tensors of the weight that it takes, and its own constants."""
