"""Experts of a mixture all at once, by Triton: nothing of it waits for the host, so it can be captured."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.fp8 import Fp8Weight, concatenated
from engine.fp8_product import Fp8Product
from engine.padded_segments import power_of_two
from engine.tiled_product import INPUTS_TILE
from engine.weight_parts import Weight, widened

#: Up to so many pairs of a row and an expert are put in order in one launch.
MOST_AT_ONCE = 4096
#: Most rows of a chunk, where its size is chosen by what tokens cost (`cluster.chunk_size`).
MOST_CHUNK_ROWS = 2048
_SUM_BLOCK = 1024


class Tile(NamedTuple):
    """What a program computes: pairs of a row and an expert by outputs, `inputs` at a time.

    `warps` of it share the work, on tiles of inputs of which `stages` are under way.
    """

    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int


#: Few pairs read weights and hardly compute: small tiles, so that many are under way.
TILES = (Tile(16, 64, 64, 4, 4), Tile(32, 64, 64, 4, 4), Tile(64, 64, 64, 4, 4), Tile(128, 64, 64, 8, 3))
#: In float32, exact and slow.
FLOAT32_TILES = (Tile(16, 64, 32, 4, 2), Tile(32, 64, 32, 4, 2))


def tile_of(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """The tile for so many pairs, spread over the experts."""
    tiles = FLOAT32_TILES if dtype == torch.float32 else TILES
    each = -(-num_pairs // num_experts)
    return next((tile for tile in tiles if each <= tile.pairs), tiles[-1])


def rows_with_other_tiles(num_experts: int, per_row: int, dtype: torch.dtype) -> list[int]:
    """Least numbers of rows, up to those of a long chunk of a prompt, that are computed in another way."""
    tiles = FLOAT32_TILES if dtype == torch.float32 else TILES
    pairs = [1, *(tile.pairs * num_experts + 1 for tile in tiles[:-1]), MOST_AT_ONCE + 1]
    return sorted({rows for each in pairs if (rows := -(-each // per_row)) <= MOST_CHUNK_ROWS})


class TritonRouter:
    """`engine.mixture.Router` to the experts of the highest probabilities, in two launches."""

    def __init__(self, weight: torch.Tensor, per_row: int, *, sums_to_one: bool) -> None:
        """See `engine.mixture.TopRouter`."""
        self._weight, self._per_row, self._sums_to_one = weight, per_row, sums_to_one

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For `x` [rows, hidden] int32 [rows, experts per row], and what they count for, float32."""
        kernels: Any = importlib.import_module("engine.expert_kernels")
        logits, rows, experts = F.linear(x, self._weight), len(x), len(self._weight)
        chosen = torch.empty(rows, self._per_row, dtype=torch.int32, device=x.device)
        weights = torch.empty(rows, self._per_row, dtype=torch.float32, device=x.device)
        if rows:
            kernels.route[(rows,)](
                logits,
                chosen,
                weights,
                experts,
                PER_ROW=self._per_row,
                EXPERTS=power_of_two(experts),
                SUMS_TO_ONE=self._sums_to_one,
                num_warps=1,
            )
        return chosen, weights


class Matrices:
    """One matrix of each expert, of floats or e4m3 numbers, as kernels take them.

    Attributes:
        shape: outputs, inputs.
        tensors: numbers and their scales; of floats nobody reads the second.
        constants: what kernels are to know of them.
    """

    def __init__(self, matrices: Sequence[Weight], dtype: torch.dtype) -> None:
        """Of `matrices` [outputs, inputs], which are copied; those of integers as floats of `dtype`.

        Raises:
            UnsuitableBlocks: if the kernels do not take their blocks.
        """
        self.shape = matrices[0].shape
        self._inputs: int | None = None
        of_eight_bits = [one for one in matrices if isinstance(one, Fp8Weight)]
        if len(of_eight_bits) == len(matrices):
            whole = concatenated(of_eight_bits)
            # Rows of float32 leave no room in registers for as many inputs as usually share a scale.
            most = FLOAT32_TILES[0].inputs if dtype == torch.float32 else INPUTS_TILE
            stored = Fp8Product(
                whole.divided(math.gcd(whole.block, most)) if whole.scales.shape[1] > 1 else whole
            )
            self.tensors, self.constants = (stored.numbers, stored.scales), stored.constants
            self._inputs = stored.inputs_tile if stored.is_blocked else None
        else:
            stacked = torch.stack([widened(one, dtype) for one in matrices])
            self.tensors = (stacked, stacked)
            self.constants = {"GROUP": 0, "IS_BLOCKED": False, "IS_NATIVE": False}

    def inputs_tile(self, wanted: int) -> int:
        """Inputs that a program takes at a time, where `wanted` would be good."""
        return wanted if self._inputs is None else self._inputs


class GroupedExperts:
    """`engine.experts.Experts` that are computed together.

    Attributes:
        num_experts: how many there are.
    """

    def __init__(self, gate_up: Sequence[Weight], down: Sequence[Weight], dtype: torch.dtype) -> None:
        """Of each expert a matrix [2 * units, hidden], gates first, and one [hidden, units]; rows of `dtype`.

        Raises:
            UnsuitableBlocks: if the kernels do not take their blocks.
        """
        self._gate_up, self._down = Matrices(gate_up, dtype), Matrices(down, dtype)
        self.num_experts = len(down)

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, tile: Tile | None = None
    ) -> torch.Tensor:
        """See `Experts`; `chosen` of int32. `tile` is by default the one for so many rows."""
        kernels: Any = importlib.import_module("engine.expert_kernels")
        experts, (hidden, units) = self.num_experts, self._down.shape
        rows, per_row = chosen.shape
        num_pairs = rows * per_row
        out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
        if not rows:
            return out
        tile = tile_of(num_pairs, experts, x.dtype) if tile is None else tile
        groups = _grouped(chosen, experts)
        # Each expert with rows has one block at most that is not full.
        blocks = min(num_pairs, num_pairs // tile.pairs + min(experts, num_pairs))
        sizes = {"EXPERTS": power_of_two(experts), "BLOCK": tile.pairs}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        gated = x.new_empty(num_pairs, units)
        kernels.gate_and_up[blocks, -(-units // tile.outputs)](
            x,
            *self._gate_up.tensors,
            *groups,
            gated,
            experts,
            units,
            hidden,
            x.stride(0),
            PER_ROW=per_row,
            UNITS=tile.outputs,
            INPUTS=self._gate_up.inputs_tile(tile.inputs),
            **self._gate_up.constants,
            **sizes,
            **options,
        )
        parts = x.new_empty(num_pairs, hidden)
        kernels.down[blocks, -(-hidden // tile.outputs)](
            gated,
            *self._down.tensors,
            *groups,
            weights,
            parts,
            experts,
            hidden,
            units,
            OUTPUTS=tile.outputs,
            UNITS=self._down.inputs_tile(tile.inputs),
            **self._down.constants,
            **sizes,
            **options,
        )
        size = rows * hidden
        kernels.add_up[(-(-size // _SUM_BLOCK),)](
            parts, out, size, hidden, PER_ROW=per_row, BLOCK=_SUM_BLOCK, num_warps=4
        )
        return out


def _grouped(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs in the order of experts, and how many there are of all experts up to each; int32."""
    num_pairs = chosen.numel()
    if num_pairs <= MOST_AT_ONCE:
        kernels: Any = importlib.import_module("engine.expert_kernels")
        order = torch.empty(num_pairs, dtype=torch.int32, device=chosen.device)
        pairs_until = torch.empty(experts, dtype=torch.int32, device=chosen.device)
        kernels.group[(experts,)](
            chosen, order, pairs_until, num_pairs, PAIRS=max(128, power_of_two(num_pairs)), num_warps=4
        )
        return order, pairs_until
    in_order, order = chosen.reshape(-1).sort(stable=True)
    numbers = torch.arange(experts, dtype=chosen.dtype, device=chosen.device)
    pairs_until = torch.searchsorted(in_order, numbers, right=True, out_int32=True)
    return order.to(torch.int32), pairs_until
