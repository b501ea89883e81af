"""The search for tiles of products with quantized weights, by Triton's interpreter, with few weights."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from benchmarks import kernel_search, product_tiles
from benchmarks.forward_floor import SHAPES, Sizes
from benchmarks.product_tiles import (
    ROWS,
    kernels_of,
    products_of,
    run,
    splits_of,
    table,
    tiles,
    ways_of,
)
from engine.fp8_product import Fp8Product
from engine.quantization import Quantization
from engine.tiled_product import Tile, tile_of
from tests import emulated_cuda

pytest.importorskip("triton")
only_without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="by the interpreter")
FEW = [Tile(32, 16, 2, 4), Tile(64, 32, 4, 3)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles and a small shape: a program takes the interpreter a millisecond."""
    monkeypatch.setattr(product_tiles, "tiles", lambda rows: FEW)
    monkeypatch.setattr(product_tiles, "_LEAST_PROGRAMS", 1)
    monkeypatch.setattr(product_tiles, "_LEAST_LAUNCHES", 3)
    monkeypatch.setattr(product_tiles, "SPLIT_ROWS", 4)
    monkeypatch.setattr(kernel_search, "BEYOND_CACHES", 1)
    monkeypatch.setitem(SHAPES, "small", Sizes(2, 256, 2, 1, 64, 128, 512))
    product_tiles._small.cache_clear()


@only_without_gpu
@pytest.mark.parametrize(
    ("quantization", "device", "dtype", "all_rows"),
    [
        ("fp8", "cpu", torch.float16, (5,)),
        ("int4", "cpu", torch.float16, (5,)),
        pytest.param("fp8", "cuda", torch.float32, (1,), marks=pytest.mark.thorough),
    ],
)
def test_ways_are_measured_and_none_is_wrong(
    small: None, quantization: Quantization, device: str, dtype: torch.dtype, all_rows: tuple[int, ...]
) -> None:
    shown: list[str] = []

    def measured() -> dict[str, object]:
        return run(
            shape="small",
            all_rows=all_rows,
            device=device,
            dtype=dtype,
            quantization=quantization,
            repeats=1,
            workers=0,
            show=shown.append,
        )

    if device == "cuda":
        with emulated_cuda.emulated_cuda():
            record = measured()
    else:
        record = measured()
    results = record["results"]
    assert isinstance(results, list)
    assert [(one["product"], one["rows"]) for one in results] == [
        (name, rows) for name in ("qkv", "out", "gate_up", "down") for rows in all_rows
    ]
    for result in results:
        ways = [(tuple(one["tile"].values()), one["splits"]) for one in result["found"]]
        assert len(ways) == len(set(ways))
        assert len(ways) == (3 if result["rows"] == 5 or result["inputs"] == 128 else 6), shown
        assert not any(one["differs"] for one in result["found"])
        assert not result["cublas"]["differs"]
        text = table(result)
        assert "  today" in text
        assert " cuBLAS" in text
    assert "all products of 2 layers" in shown[-2]
    assert "all in" in shown[-1]


@only_without_gpu
def test_a_way_that_is_wrong_or_fails_is_told(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Fp8Product.__call__

    def broken(self: Fp8Product, x: torch.Tensor, *, tile: Tile, splits: int) -> torch.Tensor:
        if tile == FEW[0]:
            raise RuntimeError("too large")
        return usual(self, x, tile=tile, splits=splits) * (1.02 if tile == FEW[1] else 1.0)

    monkeypatch.setattr(product_tiles, "compile_kernel", lambda kernel, device, dtype, quantization: None)
    monkeypatch.setattr(Fp8Product, "__call__", broken)
    shown: list[str] = []
    record = run(
        shape="small",
        all_rows=(1,),
        device="cpu",
        dtype=torch.float32,
        repeats=1,
        workers=0,
        show=shown.append,
    )
    for result in record["results"]:
        differs = {tuple(one["tile"].values()): one["differs"] for one in result["found"]}
        assert differs == {(64, 16, 2, 3): False, (64, 32, 4, 3): True}
        assert "WRONG RESULTS" in table(result)
    assert any("2 splits: RuntimeError: too large" in line for line in shown)


def test_kernels_that_cannot_be_launched_are_left_out(small: None) -> None:
    with mock.patch.object(product_tiles, "compile_all", lambda kernels, *_: dict.fromkeys(kernels, "no")):
        record = run(shape="small", all_rows=(1,), device="cpu", repeats=1, show=lambda line: None)
    assert [result["found"] for result in record["results"]] == [[]] * 4
    assert "today" not in table(record["results"][0])


@pytest.mark.parametrize("shape", ["8b", "1b"])
def test_the_search_is_short_and_has_what_is_chosen_today(shape: str) -> None:
    sizes = SHAPES[shape]
    assert len(kernels_of(sizes, ROWS)) <= 60
    for rows in ROWS:
        today = tile_of(rows, torch.bfloat16)
        assert today in tiles(rows)
        assert len(set(tiles(rows))) == 12
        for outputs, inputs in products_of(sizes).values():
            product_ways = ways_of(outputs, inputs, rows)
            assert len(product_ways) == len(set(product_ways)) <= 60
            assert product_ways[0] == (today, splits_of(outputs, inputs, rows, today)[0])
            assert rows <= 128 or len(product_ways) == 12


def test_products_are_those_of_a_forward() -> None:
    sizes = SHAPES["8b"]
    weights = sum(outputs * inputs for outputs, inputs in products_of(sizes).values())
    assert sizes.layers * weights == sizes.multiplied - sizes.hidden * sizes.vocab
