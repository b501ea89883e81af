"""The search for tiles of attention, by Triton's interpreter, with few keys."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch

from benchmarks import attention_tiles, kernel_search
from benchmarks.attention_tiles import Kernel, compile_kernel, kernels_of, run, splits_of, table, tiles
from benchmarks.forward_floor import CASES
from benchmarks.kernel_search import compile_all
from engine.attention_tiles import Tile, tile_of
from tests import emulated_cuda

pytest.importorskip("triton")
only_without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="by the interpreter")
FEW = [Tile(16, 32, 3, 4), Tile(32, 32, 5, 2)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles and small heads: a program takes the interpreter a millisecond."""
    monkeypatch.setattr(attention_tiles, "tiles", lambda *args, **options: FEW)
    monkeypatch.setattr(attention_tiles, "KV_HEADS", 1)
    monkeypatch.setattr(attention_tiles, "SHARED", 2)
    monkeypatch.setattr(kernel_search, "BEYOND_CACHES", 1)
    monkeypatch.setattr(attention_tiles, "_LEAST_LAYERS", 2)
    attention_tiles._small.cache_clear()


@only_without_gpu
@pytest.mark.parametrize(
    ("device", "cases"),
    [("cpu", ((1, 1), (2, 3))), pytest.param("cuda", ((1, 1),), marks=pytest.mark.thorough)],
)
def test_ways_are_measured_and_none_differs(
    small: None, device: str, cases: tuple[tuple[int, int], ...]
) -> None:
    shown: list[str] = []

    def measured() -> dict[str, object]:
        return run(
            dims=(16,),
            cases=cases,
            context=70,
            device=device,
            dtype=torch.float32,
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
    assert len(results) == len(cases)
    for result in results:
        ways = [(tuple(one["tile"].values()), one["splits"]) for one in result["found"]]
        assert len(ways) == len(set(ways))
        assert len(ways) >= 2, shown
        assert not any(one["differs"] for one in result["found"])
        assert "  today" in table(result)
    assert "all in" in shown[-1]


@pytest.mark.thorough
@only_without_gpu
def test_kernels_are_compiled_by_other_processes_and_those_that_cannot_be_say_why() -> None:
    kernels = [Kernel(16, Tile(16, 32, 3), True), Kernel(16, Tile(16, 24, 3), False)]
    found = compile_all(kernels, partial(compile_kernel, device="cpu", dtype=torch.float32), 1)
    assert found[kernels[0]] is None
    assert "power of 2" in (found[kernels[1]] or "")


def test_kernels_that_need_too_much_are_left_out() -> None:
    with mock.patch.object(attention_tiles, "compile_all", lambda kernels, *_: dict.fromkeys(kernels, "no")):
        record = run(dims=(16,), cases=((1, 1),), context=8, device="cpu", show=lambda line: None)
    assert [result["found"] for result in record["results"]] == [[]]


@pytest.mark.parametrize("dim", [64, 128])
def test_the_search_is_short_and_has_what_is_chosen_today(dim: int) -> None:
    assert len(kernels_of(CASES, [dim], 1024, quick=True)) < 50
    assert len(kernels_of(CASES, [dim], 1024, quick=False)) < 160
    for requests, rows in CASES:
        for tile in [tile_of(rows * 4, dim, torch.bfloat16, requests * 8), *tiles(dim, rows * 4)]:
            splits = splits_of(requests, rows, 1024 + rows, tile)
            assert len(splits) == len(set(splits)) <= 9
