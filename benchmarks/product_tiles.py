"""Which tiles and splits quantized weights are multiplied fastest with: `python -m benchmarks.product_tiles`.

For the four products of a layer, in bfloat16, by numbers of rows, beside cuBLAS with weights of bfloat16.
Times are of a captured launch, with the sum of its splits, among those with other copies of the weight, so
that none are in the cache; what lies between launches counts, too. Kernels are compiled first, by a process
per core.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks import kernel_search
from benchmarks.forward_floor import SHAPES, Sizes
from benchmarks.kernel_search import Graphs, bandwidth_of, compile_all, show_unfit
from engine.devices import synchronize
from engine.fp8 import Fp8Weight
from engine.integer_weight import IntegerWeight
from engine.quantization import Quantization
from engine.quantized_linear import QuantizedWeight, product_of
from engine.rounding import rounded
from engine.tiled_product import INPUTS_TILE, SPLIT_ROWS, Tile, TiledProduct, num_splits, tile_of

_T = TypeVar("_T")

ROWS = (1, 8, 16, 64, 256)
SPLITS = (1, 2, 4, 8)
#: Of the norm, beyond which results are wrong: rounded to bfloat16, weights are off by a third of a percent.
_MOST_ERROR = 1e-2
#: Programs of a launch beyond which more splits are not tried, and below which fewer are not: half of a GPU's
#: processors would be idle.
_MOST_PROGRAMS, _LEAST_PROGRAMS = 2200, 64
#: Launches of a captured graph, at least.
_LEAST_LAUNCHES = 16
_PRINTED = 6

#: Up to so many rows: outputs and rows of a tile, warps, and numbers of stages. Left out are those for which
#: the compiler (Triton 3.6, for Hopper) spills registers to memory.
_GRIDS: tuple[tuple[int, list[tuple[int, int, int, tuple[int, ...]]]], ...] = (
    (
        16,
        [
            (32, 16, 2, (4, 6)),
            (64, 16, 2, (3, 4, 6)),
            (64, 16, 4, (3, 4, 6)),
            (128, 16, 2, (4,)),
            (128, 16, 4, (3, 5)),
            (128, 16, 8, (4,)),
        ],
    ),
    (
        64,
        [
            (64, 32, 2, (4,)),
            (64, 32, 4, (4,)),
            (32, 64, 2, (3, 5)),
            (32, 64, 4, (4,)),
            (64, 64, 4, (2, 3, 4)),
            (64, 64, 8, (3,)),
            (128, 64, 8, (2, 3, 4)),
        ],
    ),
    (
        1 << 30,
        [
            (64, 64, 4, (3, 4)),
            (128, 64, 8, (3, 4)),
            (64, 128, 4, (2, 3)),
            (64, 128, 8, (3,)),
            (128, 128, 8, (2, 3, 4)),
            (64, 256, 8, (2, 3)),
        ],
    ),
)


class Kernel(NamedTuple):
    """One that is to be compiled; all products of a layer have the same."""

    tile: Tile
    is_split: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What a way to compute a product takes: microseconds; and its error, relative, of the norm."""

    tile: Tile
    splits: int
    us: float
    error: float

    @property
    def differs(self) -> bool:
        """Whether its results are wrong."""
        return _is_wrong(self.error)


def products_of(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the four products of a layer, by name."""
    query, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return {
        "qkv": (query + 2 * keys, sizes.hidden),
        "out": (sizes.hidden, query),
        "gate_up": (2 * sizes.units, sizes.hidden),
        "down": (sizes.hidden, sizes.units),
    }


def tiles(rows: int) -> list[Tile]:
    """Plausible tiles for so many rows."""
    grid = next(grid for most, grid in _GRIDS if rows <= most)
    return [Tile(outputs, size, warps, stage) for outputs, size, warps, stages in grid for stage in stages]


def splits_of(outputs: int, inputs: int, rows: int, tile: Tile) -> list[int]:
    """Plausible numbers of splits for a product with so many rows, the one that is made today first."""
    if rows > SPLIT_ROWS:
        return [1]
    blocks = -(-inputs // INPUTS_TILE)
    today = num_splits(outputs, blocks)
    usual = -(-rows // tile.rows) * -(-outputs // tile.outputs)
    most = min(blocks, max(1, _MOST_PROGRAMS // usual))
    least = min(most, max(1, _LEAST_PROGRAMS // usual))
    return [today] + [number for number in SPLITS if least <= number <= most and number != today]


def ways_of(
    outputs: int, inputs: int, rows: int, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[Tile, int]]:
    """Tiles with their splits for a product, what is chosen today first."""
    candidates = dict.fromkeys([tile_of(rows, dtype), *tiles(rows)])
    return [(tile, splits) for tile in candidates for splits in splits_of(outputs, inputs, rows, tile)]


def kernels_of(sizes: Sizes, all_rows: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> list[Kernel]:
    """All that the products of a layer may need."""
    found = {
        Kernel(tile, splits > 1): None
        for rows, (outputs, inputs) in itertools.product(all_rows, products_of(sizes).values())
        for tile, splits in ways_of(outputs, inputs, rows, dtype)
    }
    return list(found)


@functools.cache
def _small(device: str, dtype: torch.dtype, quantization: Quantization) -> tuple[TiledProduct, torch.Tensor]:
    """A product of two blocks of inputs and a row, to compile kernels with."""
    weight = rounded(torch.ones(INPUTS_TILE, 2 * INPUTS_TILE, device=device), quantization)
    return product_of(weight), torch.ones(1, 2 * INPUTS_TILE, dtype=dtype, device=device)


@torch.inference_mode()
def compile_kernel(kernel: Kernel, device: str, dtype: torch.dtype, quantization: Quantization) -> str | None:
    """Compile one by a launch with few weights; what is wrong if it cannot be launched."""
    from triton.errors import TritonError

    try:
        product, x = _small(device, dtype, quantization)
        product(x, tile=kernel.tile, splits=2 if kernel.is_split else 1)
        synchronize(torch.device(device))
    except (TritonError, RuntimeError) as error:  # too large, or beyond what the compiler can do
        return f"{type(error).__name__}: {error}"
    return None


class Case:
    """A product of random numbers, with copies of its weight quantized and wide.

    Attributes:
        weight_bytes: of the quantized weight.
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        device: torch.device,
        dtype: torch.dtype,
        graphs: Graphs,
        quantization: Quantization,
    ) -> None:
        """Allocate as many copies as are gone through before the first is used again."""
        generator = torch.Generator(device=device).manual_seed(0)
        made = torch.empty(outputs, inputs, device=device).normal_(0, inputs**-0.5, generator=generator)
        weight = rounded(made, quantization)
        del made
        parts = (getattr(weight, field.name) for field in fields(weight))
        self.weight_bytes = sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
        self._generator, self._graphs, self._device, self._dtype = generator, graphs, device, dtype
        self._inputs = inputs
        self._products = [product_of(_copy(weight)) for _ in range(self._copies(self.weight_bytes))]
        self._exact = weight.dequantized(torch.float32)
        plain = self._exact.to(dtype).T.contiguous()
        self._plain = [plain.clone() for _ in range(self._copies(plain.nbytes))]

    def rows(self, number: int) -> None:
        """Take so many rows from now on."""
        x = torch.randn(number, self._inputs, generator=self._generator, device=self._device)
        self._x = x.to(self._dtype)
        self._expected = self._x.float() @ self._exact.T

    def measure(self, tile: Tile, splits: int, repeats: int) -> Found:
        """Median microseconds of a product with the quantized weight, and its error.

        Raises:
            triton.errors.TritonError, RuntimeError: if it cannot be launched.
        """

        def multiply(product: TiledProduct) -> torch.Tensor:
            return product(self._x, tile=tile, splits=splits)

        return Found(tile, splits, *self._measured(multiply, self._products, repeats))

    def measure_plain(self, repeats: int) -> tuple[float, float]:
        """The same of a product with the widened weight by cuBLAS: microseconds and error."""
        return self._measured(lambda weight: torch.mm(self._x, weight), self._plain, repeats)

    def _measured(
        self, multiply: Callable[[_T], torch.Tensor], copies: Sequence[_T], repeats: int
    ) -> tuple[float, float]:
        off = multiply(copies[0]).float() - self._expected
        error = float(off.norm() / self._expected.norm())
        launches = max(len(copies), _LEAST_LAUNCHES if self._device.type == "cuda" else 1)

        def compute() -> None:
            for number in range(launches):
                multiply(copies[number % len(copies)])

        return self._graphs.seconds(compute, repeats) / launches * 1e6, error

    def _copies(self, weight_bytes: int) -> int:
        if self._device.type != "cuda":
            return 2
        return 1 + -(-kernel_search.BEYOND_CACHES // weight_bytes)


def _copy(weight: QuantizedWeight) -> QuantizedWeight:
    numbers, scales = weight.numbers.clone(), weight.scales.clone()
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(numbers, scales, weight.block)
    return IntegerWeight(numbers, scales, weight.zeros.clone(), weight.inputs, weight.bits)


@torch.inference_mode()
def run(
    *,
    shape: str = "8b",
    all_rows: Sequence[int] = ROWS,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    quantization: Quantization = "fp8",
    repeats: int = 12,
    workers: int | None = None,
    show: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Measure all; `workers` processes compile, by default one per core, with 0 this one."""
    from triton.errors import TritonError

    start = time.perf_counter()
    sizes = SHAPES[shape]
    kernels = kernels_of(sizes, all_rows, dtype)
    workers = (os.cpu_count() or 1) if workers is None else workers
    wrong = compile_all(
        kernels,
        functools.partial(compile_kernel, device=device, dtype=dtype, quantization=quantization),
        workers,
    )
    show_unfit(wrong, time.perf_counter() - start, show)
    where = torch.device(device)
    bandwidth = bandwidth_of(where)
    graphs = Graphs(where)
    results = []
    for name, (outputs, inputs) in products_of(sizes).items():
        case = Case(outputs, inputs, where, dtype, graphs, quantization)
        for rows in all_rows:
            case.rows(rows)
            ways = ways_of(outputs, inputs, rows, dtype)
            found = []
            for tile, splits in ways:
                if wrong[Kernel(tile, splits > 1)] is not None:
                    continue
                try:
                    found.append(case.measure(tile, splits, repeats))
                except (TritonError, RuntimeError) as error:
                    show(f"  {tile}, {splits} splits: {type(error).__name__}: {str(error)[:120]}")
            cublas_us, cublas_error = case.measure_plain(repeats)
            result = {
                "product": name,
                "outputs": outputs,
                "inputs": inputs,
                "rows": rows,
                "floor_us": case.weight_bytes / bandwidth * 1e6,
                "today": {"tile": asdict(ways[0][0]), "splits": ways[0][1]},
                "cublas": {"us": cublas_us, "error": cublas_error, "differs": _is_wrong(cublas_error)},
                "found": [
                    asdict(one) | {"differs": one.differs} for one in sorted(found, key=lambda one: one.us)
                ],
            }
            results.append(result)
            show(table(result))
        del case
    show(totals(sizes.layers, results))
    show(f"all in {time.perf_counter() - start:.0f} s")
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else device,
        "shape": shape,
        "quantization": quantization,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes_per_second": bandwidth,
        "results": results,
    }


def table(result: dict[str, Any]) -> str:
    """A product and number of rows for people: what is chosen today, the best, and cuBLAS."""
    lines = [
        f"{result['product']} {result['outputs']} x {result['inputs']}, {result['rows']} rows, "
        f"floor {result['floor_us']:.1f} us, {len(result['found'])} ways",
        f"{'':>7}{'us':>9}{'outputs':>9}{'rows':>6}{'warps':>7}{'stages':>8}{'splits':>8}",
    ]
    today = _chosen(result)
    for name, one in [("today", one) for one in today] + [("", one) for one in result["found"][:_PRINTED]]:
        tile = one["tile"]
        lines.append(
            f"{name:>7}{one['us']:9.2f}{tile['outputs']:9}{tile['rows']:6}{tile['warps']:7}"
            f"{tile['stages']:8}{one['splits']:8}{_warning(one)}"
        )
    plain = result["cublas"]
    return "\n".join([*lines, f"{'cuBLAS':>7}{plain['us']:9.2f}{_warning(plain)}"])


def totals(layers: int, results: Sequence[dict[str, Any]]) -> str:
    """Milliseconds of all products of a forward, with the best of each that is not wrong."""
    lines = [
        f"all products of {layers} layers, ms",
        f"{'rows':>7}{'floor':>9}{'today':>9}{'best':>9}{'cuBLAS':>9}",
    ]
    for rows in dict.fromkeys(one["rows"] for one in results):
        of_rows = [one for one in results if one["rows"] == rows]
        right = [[way["us"] for way in one["found"] if not way["differs"]] for one in of_rows]
        sums = (
            sum(one["floor_us"] for one in of_rows),
            sum(min((way["us"] for way in _chosen(one)), default=float("nan")) for one in of_rows),
            sum(min(found, default=float("nan")) for found in right),
            sum(one["cublas"]["us"] for one in of_rows),
        )
        lines.append(f"{rows:7}" + "".join(f"{one * layers / 1e3:9.3f}" for one in sums))
    return "\n".join(lines)


def _chosen(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The way that is chosen today; none if it cannot be launched."""
    today = result["today"]
    return [
        one for one in result["found"] if one["tile"] == today["tile"] and one["splits"] == today["splits"]
    ]


def _is_wrong(error: float) -> bool:
    return not error <= _MOST_ERROR  # nor is what is no number right


def _warning(one: dict[str, Any]) -> str:
    return "  WRONG RESULTS" if one["differs"] else ""


def main() -> None:
    """Print the products, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--shape", choices=("8b", "1b"), default="8b", help="sizes of Llama 3.1 8B or 3.2 1B")
    parser.add_argument("--quantization", choices=("fp8", "int4"), default="fp8", help="of the weights")
    options = parser.parse_args()
    record = run(shape=options.shape, quantization=options.quantization)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
