"""Which tiles and splits the attention kernel is fastest with: `python -m benchmarks.attention_tiles`.

For layers of 8 key heads and 32 query heads in bfloat16. Times are of a captured launch among those of other
layers, each with keys of its own, so that none are in the cache; what lies between launches counts, too.
Kernels are compiled first, by a process per core: Triton keeps what was compiled in a folder.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import kernel_search
from benchmarks.forward_cost import batch
from benchmarks.forward_floor import CASES
from benchmarks.kernel_search import Graphs, bandwidth_of, compile_all, show_unfit
from engine.attention_tiles import Tile, num_splits, tile_of
from engine.devices import memory_of, synchronize
from engine.triton_attention import TritonAttention, TritonPlan

#: Key heads, and query heads that share each.
KV_HEADS, SHARED = 8, 4
SPLITS = (1, 2, 4, 8, 16, 17, 32)
_LEAST_LAYERS, _MOST_LAYERS = 8, 64
#: Programs of a launch beyond which more splits are not tried.
_MOST_PROGRAMS = 2200
#: Tiles that are tried with all splits: those that are fastest with the splits that are made today.
_FINALISTS = 6
_PRINTED = 10


class Kernel(NamedTuple):
    """One that is to be compiled."""

    dim: int
    tile: Tile
    is_split: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What a way to compute a case takes: microseconds of a layer; `differs` if its results are wrong."""

    tile: Tile
    splits: int
    us: float
    differs: bool = False


def tiles(dim: int, queries: int, *, quick: bool = False) -> list[Tile]:
    """Plausible tiles for so many queries of a request and key head."""
    grid: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]
    if queries <= 16:
        grid = [(16, keys, (3, 5, 7), (1, 2, 4)) for keys in (16, 32, 64, 128)]
    else:
        grid = [(32, keys, (2, 3, 5), (2, 4, 8)) for keys in (32, 64, 128)]
        grid += [(64, keys, (2, 3), (4, 8)) for keys in (32, 64, 128)]
    found = [
        Tile(size, keys, stage, warp)
        for size, keys, stages, warps in grid
        for stage, warp in itertools.product(stages, warps)
        if (keys > 16 or dim > 64)
        and (keys < 128 or stage < 7)
        # What a warp has of a tile is to fit in its registers.
        and size * keys <= 1024 * warp
    ]
    if quick:
        found = [tile for tile in found if tile.stages in (2, 5) and tile.warps in (2, 4) and tile.keys < 128]
    return found


def programs(requests: int, rows: int, tile: Tile) -> int:
    """Of a launch without splits."""
    return requests * KV_HEADS * -(-rows * SHARED // tile.queries)


def splits_of(requests: int, rows: int, keys: int, tile: Tile) -> list[int]:
    """Plausible numbers of splits for a case with so many keys, the one that is made today first."""
    usual = programs(requests, rows, tile)
    today = num_splits(usual, keys, tile.keys)
    most = min(-(-keys // tile.keys), max(1, _MOST_PROGRAMS // usual))
    least = min(most, max(1, 128 // usual))  # fewer leave half of a GPU's processors idle
    return [today] + [number for number in SPLITS if least <= number <= most and number != today]


def kernels_of(
    cases: Sequence[tuple[int, int]], dims: Sequence[int], context: int, *, quick: bool
) -> list[Kernel]:
    """All that the cases may need."""
    found: dict[Kernel, None] = {}
    for dim, (requests, rows) in itertools.product(dims, cases):
        for tile in [_today(requests, rows, dim), *tiles(dim, rows * SHARED, quick=quick)]:
            for splits in splits_of(requests, rows, context + rows, tile):
                found[Kernel(dim, tile, splits > 1)] = None
    return list(found)


def _today(requests: int, rows: int, dim: int) -> Tile:
    return tile_of(rows * SHARED, dim, torch.bfloat16, requests * KV_HEADS)


@functools.cache
def _small(dim: int, device: str, dtype: torch.dtype) -> tuple[TritonAttention, TritonPlan, torch.Tensor]:
    """An attention, a plan and queries of one request, to compile kernels with."""
    attention = TritonAttention(16, dtype=dtype, device=device)
    attention.allocate(0, KV_HEADS, dim, dim)
    plan = attention.plan(batch(1, 1, 7, 2, 16))
    q = torch.zeros(1, KV_HEADS * SHARED, dim, dtype=dtype, device=device)
    return attention, plan, q


@torch.inference_mode()
def compile_kernel(kernel: Kernel, device: str, dtype: torch.dtype) -> str | None:
    """Compile one by a launch with few keys; what is wrong if it cannot be launched, most often its size."""
    from triton.errors import TritonError

    try:
        attention, plan, q = _small(kernel.dim, device, dtype)
        attention._attend(plan, 0, q, None, kernel.tile, 2 if kernel.is_split else 1)
        synchronize(torch.device(device))
    except (TritonError, RuntimeError) as error:  # too large, or beyond what the compiler can do
        return f"{type(error).__name__}: {error}"
    return None


class Case:
    """Layers' attentions of a batch, each with keys of its own."""

    def __init__(
        self,
        requests: int,
        rows: int,
        context: int,
        dim: int,
        device: torch.device,
        dtype: torch.dtype,
        graphs: Graphs,
    ) -> None:
        """Allocate and fill them; as many as fit in half of the memory that is free, up to what is of use."""
        slots = requests * (context + rows) + 8
        layer_bytes = slots * 2 * KV_HEADS * dim * dtype.itemsize
        wanted = min(_MOST_LAYERS, max(_LEAST_LAYERS, -(-kernel_search.BEYOND_CACHES // layer_bytes)))
        if device.type == "cuda":
            self.layers = max(1, min(wanted, memory_of(device).free // 2 // layer_bytes))
        else:
            self.layers = 2
        self._graphs = graphs
        self.attention = TritonAttention(slots, dtype=dtype, device=device)
        for layer in range(self.layers):
            self.attention.allocate(layer, KV_HEADS, dim, dim)
            self.attention.storage(layer).normal_()
        self.plan = self.attention.plan(batch(requests, rows, context, 2, slots))
        self.q = torch.randn(requests * rows, KV_HEADS * SHARED, dim, device=device).to(dtype)
        self._expected: torch.Tensor | None = None

    def measure(self, tile: Tile, splits: int, repeats: int) -> Found:
        """Median microseconds of a layer."""
        out = self.attention._attend(self.plan, 0, self.q, None, tile, splits).float()
        if self._expected is None:
            self._expected = out
        differs = not torch.allclose(out, self._expected, atol=4e-3, rtol=2e-2)

        def compute() -> None:
            for layer in range(self.layers):
                self.attention._attend(self.plan, layer, self.q, None, tile, splits)

        seconds = self._graphs.seconds(compute, repeats)
        return Found(tile, splits, seconds / self.layers * 1e6, differs)


@torch.inference_mode()
def run(
    *,
    dims: Sequence[int] = (128, 64),
    cases: Sequence[tuple[int, int]] = CASES,
    context: int = 1024,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 20,
    workers: int | None = None,
    quick: bool = False,
    show: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Measure all; `workers` processes compile, by default one per core, with 0 this one."""
    start = time.perf_counter()
    kernels = kernels_of(cases, dims, context, quick=quick)
    workers = (os.cpu_count() or 1) if workers is None else workers
    wrong = compile_all(kernels, functools.partial(compile_kernel, device=device, dtype=dtype), workers)
    show_unfit(wrong, time.perf_counter() - start, show)
    where = torch.device(device)
    bandwidth = bandwidth_of(where)
    graphs = Graphs(where)
    results = []
    for dim, (requests, rows) in itertools.product(dims, cases):
        keys = context + rows
        case = Case(requests, rows, context, dim, where, dtype, graphs)
        today = _today(requests, rows, dim)

        def measured(
            ways: Iterable[tuple[Tile, int]], case: Case = case, dim: int = dim
        ) -> dict[tuple[Tile, int], Found]:
            fit = [way for way in ways if wrong[Kernel(dim, way[0], way[1] > 1)] is None]
            return {way: case.measure(*way, repeats) for way in fit}

        candidates = list(dict.fromkeys([today, *tiles(dim, rows * SHARED, quick=quick)]))
        of_tile = {tile: splits_of(requests, rows, keys, tile) for tile in candidates}
        found = measured((tile, splits[0]) for tile, splits in of_tile.items())
        finalists = sorted(found.values(), key=lambda one: one.us)[:_FINALISTS]
        best = dict.fromkeys([today, *(one.tile for one in finalists)])
        found |= measured((tile, splits) for tile in best for splits in of_tile[tile][1:])
        read = requests * keys * 2 * KV_HEADS * dim * dtype.itemsize
        result = {
            "dim": dim,
            "requests": requests,
            "rows": rows,
            "layers": case.layers,
            "floor_us": read / bandwidth * 1e6,
            "today": {"tile": today._asdict(), "splits": of_tile[today][0]},
            "found": [
                asdict(one) | {"tile": one.tile._asdict()}
                for one in sorted(found.values(), key=lambda one: one.us)
            ],
        }
        results.append(result)
        show(table(result))
        del case
    show(f"all in {time.perf_counter() - start:.0f} s")
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else device
    return {"device": name, "context": context, "bytes_per_second": bandwidth, "results": results}


def table(result: dict[str, Any]) -> str:
    """A case for people: what is chosen today, and the best."""
    today, found = result["today"], result["found"]
    title = (
        f"{result['requests']} requests x {result['rows']} rows, heads of {result['dim']}, "
        f"{result['layers']} layers, floor {result['floor_us']:.1f} us, {len(found)} ways"
    )
    chosen = [one for one in found if one["tile"] == today["tile"] and one["splits"] == today["splits"]]
    lines = [title, f"{'':>7}{'us':>8}{'queries':>9}{'keys':>6}{'stages':>8}{'warps':>7}{'splits':>8}"]
    for name, one in [("today", one) for one in chosen] + [("", one) for one in found[:_PRINTED]]:
        tile = one["tile"]
        lines.append(
            f"{name:>7}{one['us']:8.2f}{tile['queries']:9}{tile['keys']:6}{tile['stages']:8}"
            f"{tile['warps']:7}{one['splits']:8}{'  WRONG RESULTS' if one['differs'] else ''}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the cases, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--dim", type=int, choices=(64, 128), help="only heads of this size")
    parser.add_argument("--quick", action="store_true", help="a third of the tiles")
    options = parser.parse_args()
    dims = (128, 64) if options.dim is None else (options.dim,)
    record = run(dims=dims, quick=options.quick)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
