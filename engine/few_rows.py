"""Products of a few rows in Triton: what decoding and small trees do to weights, which are read once."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from engine.padded_segments import power_of_two
from engine.triton_support import runs_triton

#: Rows that the kernel takes; more, and a product of cuBLAS is not bound by reading the weights.
MOST_ROWS = 64
_LEAST_ROWS = 16  # that tensor cores multiply, padding among them
#: Splits of a product's inputs, at most.
MOST_SPLITS = 8
#: Of programs that count each other, over all outputs of a product.
_MOST_TILES = 1 << 16
_DTYPES = (torch.bfloat16, torch.float16)
#: Compute capability of the GPUs that this was measured on: Hopper. With the tensor cores' instructions of
#: older ones it took twice cuBLAS' time there.
_MEASURED = 9


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program works on: outputs, inputs at a time, warps, and tiles of inputs under way."""

    outputs: int
    inputs: int
    warps: int
    stages: int


#: Programs from which an H200's memory is busy, one to a processor; inputs are split for as many.
ENOUGH_PROGRAMS = 128


def serves(weight: torch.Tensor) -> bool:
    """Whether products with `weight` [outputs, inputs] are computed here."""
    if weight.dtype not in _DTYPES or not runs_triton(weight.device):
        return False
    return torch.cuda.get_device_capability(weight.device)[0] == _MEASURED


def tile_of(rows: int) -> Tile:
    """The tile for a number of rows: two programs of a plain product fit on a processor."""
    return Tile(64, 128, 4, 4 if rows <= 32 else 3)


def num_splits(outputs: int, inputs: int, tile: Tile) -> int:
    """In how many parts the inputs of a product are summed: a power of two."""
    programs, blocks = -(-outputs // tile.outputs), -(-inputs // tile.inputs)
    splits = 1
    while programs * splits < ENOUGH_PROGRAMS and splits < MOST_SPLITS and blocks >= 4 * splits:
        splits *= 2
    return splits


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float | None = None,
    gated: bool = False,
    tile: Tile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias + residual`, or the gated product of two halves of `weight`, rounded once.

    One launch of a device is under way at a time: splits of a product count each other in memory that all
    products share.

    Args:
        x: [rows, inputs], at most `MOST_ROWS`.
        weight: [outputs, inputs] of the same type (`serves`); if `gated`, gates first, then what they gate.
        bias: [outputs].
        residual: [rows, outputs], read where it lies.
        eps: normalise rows first: divide them by the root of their mean square plus this.
        gated: SiLU of the gates times what they gate, [rows, outputs / 2], without bias and residual.
        tile, splits: how, where the usual way is not wanted.

    Returns:
        [rows, outputs], of x's type.
    """
    kernels: Any = importlib.import_module("engine.few_rows_kernels")
    rows, inputs = x.shape
    held = max(_LEAST_ROWS, power_of_two(rows))
    outputs = weight.shape[0] // (2 if gated else 1)
    tile = tile or tile_of(rows)
    splits = splits or num_splits(outputs, inputs, tile)
    tiles, blocks = -(-outputs // tile.outputs), -(-inputs // tile.inputs)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    partial = squares = counters = out  # never read where there is one split
    if splits > 1:
        numbers = splits * rows * outputs * (2 if gated else 1)
        partial = torch.empty(numbers, dtype=torch.float32, device=x.device)
        squares = torch.empty(tiles * splits * held, dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
    kernels.multiply[tiles, splits](
        x,
        weight,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        partial,
        squares,
        counters,
        rows,
        outputs,
        inputs,
        x.stride(0),
        -(-blocks // splits),
        0.0 if eps is None else eps,
        OUTPUTS=tile.outputs,
        ROWS=held,
        INPUTS=tile.inputs,
        SPLITS=splits,
        IS_NORMED=eps is not None,
        IS_GATED=gated,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def normalised_by_triton(x: torch.Tensor, gain: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`torch.nn.functional.rms_norm` of rows [rows, size], in half its time where rows are few."""
    kernels: Any = importlib.import_module("engine.few_rows_kernels")
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        kernels.normalise[(rows,)](
            x,
            out if gain is None else gain,
            out,
            size,
            x.stride(0),
            eps,
            BLOCK=power_of_two(size),
            HAS_GAIN=gain is not None,
            num_warps=8 if size > 2048 else 4,
        )
    return out
