"""Products of few rows on a GPU: our kernel with tiles of many sizes beside cuBLAS, and both norms.

python -m benchmarks.few_rows_cost --shape 8b --json cost.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.forward_floor import SHAPES, Sizes
from engine import few_rows
from engine.few_rows import Tile, multiply, normalised_by_triton
from engine.gated import gate_by_triton

TILES = (
    Tile(64, 64, 4, 4),
    Tile(64, 64, 4, 6),
    Tile(64, 128, 4, 3),
    Tile(64, 128, 4, 4),
    Tile(64, 128, 4, 5),
    Tile(128, 64, 4, 4),
    Tile(128, 128, 8, 3),
)
_EPS = 1e-5
#: Bytes of weights that calls go through in turns, so that no cache holds them.
_AROUND = 256 << 20
_PRINTED = 4


@dataclass(frozen=True, slots=True)
class Product:
    """One of a layer's: its sizes, and what is done on the way."""

    name: str
    outputs: int
    inputs: int
    normed: bool = False
    gated: bool = False
    added: bool = False
    splits: tuple[int, ...] = (1, 2, 4, 8)

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.outputs * (2 if self.gated else 1), self.inputs


def products(sizes: Sizes) -> list[Product]:
    """Those of a forward."""
    heads = sizes.head_dim * (sizes.heads + 2 * sizes.kv_heads)
    return [
        Product("qkv", heads, sizes.hidden, normed=True),
        Product("out", sizes.hidden, sizes.heads * sizes.head_dim, added=True),
        Product("gate_up", sizes.units, sizes.hidden, normed=True, gated=True, splits=(1, 2)),
        Product("down", sizes.hidden, sizes.units, added=True),
        Product("head", sizes.vocab, sizes.hidden, splits=(1,)),
    ]


def ours(product: Product, tile: Tile, splits: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The product by our kernel, of rows and a weight."""

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        residual = x.new_empty(len(x), product.outputs) if product.added else None
        eps = _EPS if product.normed else None
        return multiply(x, weight, residual=residual, eps=eps, gated=product.gated, tile=tile, splits=splits)

    return call


def normalised(x: torch.Tensor) -> torch.Tensor:
    """Rows normalised by torch."""
    return F.rms_norm(x, (x.shape[1],), None, _EPS)


def cublas(product: Product, *, rows_first: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The same by torch, norm and gate apart; weights are [inputs, outputs] if `rows_first`."""

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if product.normed:
            x = normalised(x)
        transposed = weight if rows_first else weight.t()
        if product.added:
            out = x.new_empty(len(x), product.outputs).addmm_(x, transposed)
        else:
            out = torch.mm(x, transposed)
        return gate_by_triton(out) if product.gated else out

    return call


def microseconds(
    call: Callable[[torch.Tensor, torch.Tensor], object], x: torch.Tensor, weights: Sequence[torch.Tensor]
) -> float:
    """Of one call, the median over replays of a graph of one with every weight."""
    for weight in weights[:1]:
        call(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(x, weight)
    found = []
    for _ in range(23):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / len(weights))
    return median(found[3:])


def compile_one(asked: tuple[Product, Tile, int]) -> None:
    """Launch once, with little, what is measured later; in a process of its own."""
    product, tile, splits = asked
    small = Product("", 2 * tile.outputs, 16 * tile.inputs, product.normed, product.gated, product.added)
    x = torch.zeros(1, small.inputs, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(small.weight_shape, dtype=torch.bfloat16, device="cuda")
    try:
        ours(small, tile, splits)(x, weight)
    except Exception as error:  # of the measurement, too, which says so
        print(f"{tile} {splits}: {error}")


def check(product: Product, tile: Tile, splits: int, rows: int) -> float:
    """Relative error against float64 of a smaller product."""
    torch.manual_seed(rows)
    inputs = min(product.inputs, 4096)
    small = Product("", 1000, inputs, product.normed, product.gated, product.added)
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    weight = (torch.randn(small.weight_shape, device="cuda") * inputs**-0.5).bfloat16()
    residual = torch.randn(rows, 1000, device="cuda").bfloat16() if product.added else None
    wide = x.double()
    if product.normed:
        wide = F.rms_norm(wide, (inputs,), None, _EPS)
    expected = wide @ weight.double().T
    if product.gated:
        expected = F.silu(expected[:, :1000]) * expected[:, 1000:]
    if residual is not None:
        expected += residual
    eps = _EPS if product.normed else None
    worst = 0.0
    for _ in range(5):
        found = multiply(
            x, weight, residual=residual, eps=eps, gated=product.gated, tile=tile, splits=splits
        ).double()
        worst = max(worst, float((found - expected).norm() / expected.norm()))
    return worst


def _worst(product: Product, tile: Tile, rows: int) -> float:
    try:
        return max(check(product, tile, splits, rows) for splits in product.splits)
    except Exception:  # too much shared memory; the measurement says so
        return 0.0


def measure(product: Product, rows: int, tiles: Sequence[Tile]) -> dict[str, Any]:
    """All ways to compute one product for so many rows."""
    torch.manual_seed(0)
    outputs, inputs = product.weight_shape
    copies = max(2, _AROUND // (2 * outputs * inputs))
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    weights = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(copies)]
    found: dict[str, float] = {
        "cuBLAS, [outputs, inputs]": microseconds(cublas(product, rows_first=False), x, weights)
    }
    flipped = [weight.t().contiguous() for weight in weights]
    found["cuBLAS, [inputs, outputs]"] = microseconds(cublas(product, rows_first=True), x, flipped)
    del flipped
    if rows <= few_rows.MOST_ROWS:
        for tile in tiles:
            for splits in product.splits:
                try:
                    us = microseconds(ours(product, tile, splits), x, weights)
                except Exception as error:  # too much shared memory
                    print(product.name, tile, splits, type(error).__name__, str(error)[:80])
                    continue
                found[
                    f"{tile.outputs}x{tile.inputs} {tile.warps} warps {tile.stages} stages, {splits} splits"
                ] = us
    return {
        "product": asdict(product),
        "rows": rows,
        "floor_us": 2 * outputs * inputs / 4.16e12 * 1e6,
        "us": dict(sorted(found.items(), key=lambda one: one[1])),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the best of each and write all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=[*SHAPES], default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    asked = products(SHAPES[arguments.shape])
    jobs = {
        (p.normed, p.gated, p.added, tile, splits): (p, tile, splits)
        for p in asked
        for tile in TILES
        for splits in p.splits
    }
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        pool.map(compile_one, list(jobs.values()), chunksize=4)
    for product in asked:
        for tile in TILES:
            for rows in (16, 64):
                worst = _worst(product, tile, rows)
                if worst > 6e-3:
                    print(f"WRONG: {product.name} of {rows} rows by {tile}: relative error {worst:.1e}")
    results = []
    for rows in arguments.rows:
        for product in asked:
            one = measure(product, rows, TILES)
            results.append(one)
            best = list(one["us"].items())
            shown = dict(best[:_PRINTED]) | {name: us for name, us in best if name.startswith("cuBLAS")}
            print(
                f"{rows} rows, {product.name}: floor {one['floor_us']:.1f} us; "
                + "; ".join(f"{name} {us:.1f}" for name, us in shown.items())
            )
    norms = {}
    for rows in (1, 16, 64, 256):
        x = torch.randn(rows, SHAPES[arguments.shape].hidden, device="cuda").bfloat16()
        weights = [x] * 32
        norms[rows] = [
            microseconds(lambda x, _: normalised(x), x, weights),
            microseconds(lambda x, _: normalised_by_triton(x, None, _EPS), x, weights),
        ]
        print(f"norm of {rows} rows: torch {norms[rows][0]:.2f} us, Triton {norms[rows][1]:.2f} us")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"products": results, "norms": norms}, indent=2) + "\n")


if __name__ == "__main__":
    main()
