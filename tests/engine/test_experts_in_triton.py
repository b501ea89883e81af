"""Experts in Triton, run by its interpreter on a CPU, against each by itself; and what they compile to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import grouped_experts
from engine.experts import FeedForward, SeparateExperts
from engine.fp8 import quantized
from engine.grouped_experts import (
    FLOAT32_TILES,
    MOST_AT_ONCE,
    TILES,
    GroupedExperts,
    Matrices,
    Tile,
    TritonRouter,
    rows_with_other_tiles,
    tile_of,
)
from engine.linear import Linear
from engine.mixture import TopRouter
from tests.engine.compiling import Kernel, compiled

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these kernels on the GPU")
some = settings(max_examples=15, deadline=None)
few = settings(some, max_examples=6)
#: Experts, of a row, rows, hidden, units: tiles that are full and that are not.
sizes = st.tuples(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 40), st.integers(4, 70), st.integers(4, 70)
)
HALF = torch.float16


@some
@given(st.integers(1, 70), st.integers(1, 8), st.integers(1, 5), st.booleans(), st.booleans())
def test_rows_are_sent_to_the_likeliest_experts(
    num_experts: int, per_row: int, rows: int, sums_to_one: bool, is_half: bool
) -> None:
    per_row = min(per_row, num_experts)
    generator = torch.Generator().manual_seed(num_experts * per_row)
    dtype = HALF if is_half else torch.float32
    x, weight = (torch.randn(n, 12, generator=generator).to(dtype) for n in (rows, num_experts))
    chosen, weights = TritonRouter(weight, per_row, sums_to_one=sums_to_one)(x)
    expected, by = TopRouter(weight, per_row, sums_to_one=sums_to_one)(x)
    assert chosen.dtype == torch.int32
    torch.testing.assert_close(weights, by)
    # Of equal probabilities either is right.
    logits = torch.nn.functional.linear(x, weight)
    assert torch.equal(logits.gather(1, chosen.long()), logits.gather(1, expected))
    assert all(len(set(row)) == per_row for row in chosen.tolist())


def test_of_equal_experts_the_first_are_taken() -> None:
    chosen, weights = TritonRouter(torch.zeros(5, 4), 3, sums_to_one=True)(torch.ones(2, 4))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@some
@given(sizes, st.sampled_from([torch.float32, HALF]), st.booleans())
def test_experts_all_at_once_are_each_by_itself(
    size: tuple[int, int, int, int, int], dtype: torch.dtype, are_many: bool
) -> None:
    num_experts, per_row, rows, hidden, units = size
    per_row = min(per_row, num_experts)
    generator = torch.Generator().manual_seed(sum(size))
    gate_up = torch.randn(num_experts, 2 * units, hidden, generator=generator).mul_(hidden**-0.5).to(dtype)
    down = torch.randn(num_experts, hidden, units, generator=generator).mul_(units**-0.5).to(dtype)
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    router = TopRouter(
        torch.randn(num_experts, hidden, generator=generator).to(dtype), per_row, sums_to_one=False
    )
    chosen, weights = router(x)
    alone = SeparateExperts(
        [FeedForward(Linear(a), Linear(b)) for a, b in zip(gate_up.float(), down.float(), strict=True)]
    )
    expected = alone(x.float(), chosen, weights)
    with pytest.MonkeyPatch.context() as patch:
        if are_many:  # then pairs are sorted, and tiles larger
            patch.setattr(grouped_experts, "MOST_AT_ONCE", 0)
        tile = Tile(32, 32, 16, 4, 2) if are_many else None
        got = GroupedExperts([*gate_up], [*down], dtype)(x, chosen.int(), weights, tile=tile)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


@few
@given(sizes, st.sampled_from([16, 32, 0]))
def test_experts_of_eight_bits_are_what_their_numbers_say(
    size: tuple[int, int, int, int, int], block: int
) -> None:
    num_experts, per_row, rows, hidden, units = size
    per_row = min(per_row, num_experts)
    generator = torch.Generator().manual_seed(sum(size))
    shapes = [(2 * units, hidden)] * num_experts, [(hidden, units)] * num_experts
    gate_up, down = (
        [
            quantized(
                torch.randn(*shape, generator=generator).mul_(shape[1] ** -0.5), block or 2 * max(shape)
            )
            for shape in each
        ]
        for each in shapes
    )
    x = torch.randn(rows, hidden, generator=generator)
    chosen, weights = TopRouter(
        torch.randn(num_experts, hidden, generator=generator), per_row, sums_to_one=True
    )(x)
    floats = ([one.dequantized(torch.float32) for one in each] for each in (gate_up, down))
    alone = SeparateExperts([FeedForward(Linear(a), Linear(b)) for a, b in zip(*floats, strict=True)])
    got = GroupedExperts(gate_up, down, torch.float32)(x, chosen.int(), weights)
    torch.testing.assert_close(got, alone(x, chosen, weights), atol=1e-5, rtol=1e-5)


def test_scales_are_shared_by_neighbours_of_one_expert() -> None:
    """Published blocks are of 128 outputs, of which kernels read one scale."""
    generator = torch.Generator().manual_seed(0)
    gate_up = [quantized(torch.randn(256, 130, generator=generator)) for _ in range(3)]
    down = [quantized(torch.randn(130, 128, generator=generator)) for _ in range(3)]
    experts = GroupedExperts(gate_up, down, torch.float32)
    assert experts._gate_up.constants["GROUP"] == 128
    assert experts._down.constants["GROUP"] == 1
    assert experts._gate_up.inputs_tile(64) == 32
    assert Matrices(gate_up, torch.bfloat16).inputs_tile(64) == 128
    x = torch.randn(2, 130, generator=generator).mul_(0.1)
    chosen, weights = torch.tensor([[2], [1]], dtype=torch.int32), torch.ones(2, 1)
    for row, number in enumerate((2, 1)):
        expert = FeedForward(*(Linear(each[number].dequantized(torch.float32)) for each in (gate_up, down)))
        got = experts(x, chosen, weights)[row]
        torch.testing.assert_close(got, expert(x[row : row + 1])[0], atol=1e-3, rtol=1e-4)


def test_rows_that_lie_apart_and_no_rows_at_all() -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(3, outputs, 8, generator=generator) for outputs in (16, 8))
    experts = GroupedExperts([*gate_up], [*down], torch.float32)
    wide = torch.randn(4, 20, generator=generator)
    chosen, weights = torch.tensor([[0], [2], [2], [1]], dtype=torch.int32), torch.ones(4, 1)
    apart = experts(wide[:, :8], chosen, weights)
    torch.testing.assert_close(apart, experts(wide[:, :8].contiguous(), chosen, weights))
    assert experts(wide[:0, :8], chosen[:0], weights[:0]).shape == (0, 8)
    assert TritonRouter(torch.ones(3, 8), 1, sums_to_one=True)(wide[:0, :8])[0].shape == (0, 1)


def kernel(name: str, tile: Tile, dtype: str, arch: int, group: int = 0) -> Kernel:
    """Of Qwen3-30B-A3B's experts, of floats or in fine-grained FP8."""
    stored = (
        {"matrices": "*u8", "scales": "*fp32"}
        if group
        else dict.fromkeys(("matrices", "scales"), f"*{dtype}")
    )
    types = {"x": f"*{dtype}", **stored, "order": "*i32", "pairs_until": "*i32"}
    constants: dict[str, Any] = {"EXPERTS": 128, "BLOCK": tile.pairs}
    inputs = 128 if group else tile.inputs
    if name == "down":
        types |= {"weights": "*fp32", "out": f"*{dtype}"}
        numbers = ("num_experts", "outputs", "units")
        constants |= {"OUTPUTS": tile.outputs, "UNITS": inputs}
    else:
        types |= {"out": f"*{dtype}"}
        numbers = ("num_experts", "units", "inputs", "x_stride")
        constants = {"PER_ROW": 8, **constants, "UNITS": tile.outputs, "INPUTS": inputs}
    constants |= {"GROUP": group, "IS_BLOCKED": group > 0, "IS_NATIVE": group > 0 and arch == 90}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "arch": arch}
    return f"engine.expert_kernels.{name}", types | dict.fromkeys(numbers, "i32"), constants, options


def test_the_tile_is_by_how_many_rows_an_expert_has() -> None:
    pairs_each = (1, 16, 17, 64, 65, 500)
    found = [tile_of(128 * each, 128, torch.bfloat16).pairs for each in pairs_each]
    assert found == [16, 16, 32, 64, 128, 128]
    exact = [tile_of(128 * each, 128, torch.float32).pairs for each in pairs_each]
    assert exact == [16, 16, 32, 32, 32, 32]


def test_every_way_to_compute_rows_is_tried_when_loading() -> None:
    """Of Qwen3-30B-A3B: a tile for each so many rows of an expert, and pairs that are sorted."""
    rows = rows_with_other_tiles(128, 8, torch.bfloat16)
    assert rows == [1, 257, 513, 1025]
    assert [tile_of(8 * each, 128, torch.bfloat16) for each in rows] == [
        TILES[0],
        TILES[1],
        TILES[2],
        TILES[3],
    ]
    assert MOST_AT_ONCE // 8 < 513
    assert rows_with_other_tiles(8, 2, torch.bfloat16) == [1, 65, 129, 257]
    assert rows_with_other_tiles(64, 1, torch.float32) == [1, 1025]


@pytest.mark.parametrize(
    "cases",
    [
        [(90, "bf16", TILES[0], 0), (90, "bf16", TILES[0], 128)],
        pytest.param(
            [
                *((90, "bf16", tile, group) for tile in TILES[1:] for group in (0, 128)),
                *((80, "bf16", tile, group) for tile in TILES for group in (0, 128)),
                *((arch, "fp32", tile, 0) for arch in (80, 90) for tile in FLOAT32_TILES),
            ],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["few rows", "others"],
)
def test_tiles_keep_to_registers_and_loads_are_under_way(cases: list[tuple[int, str, Tile, int]]) -> None:
    """Compiled for Hopper and Ampere: few spills, and weights are fetched while others are multiplied."""
    kernels = [
        kernel(name, tile, dtype, arch, group)
        for arch, dtype, tile, group in cases
        for name in ("gate_and_up", "down")
    ]
    for one, code in zip(kernels, compiled(kernels), strict=True):
        print(one[0], one[2], one[3], code[:4])
        # Bytes of a thread: in the tiles of many rows those that are widened have no room for all.
        assert code.spilled <= (256 if one[2]["GROUP"] and one[2]["BLOCK"] > 32 else 0)
        assert "cp.async" in code.ptx
        least = 2 if one[2]["BLOCK"] <= 32 else 1
        assert code.fitting((227 if one[3]["arch"] == 90 else 164) << 10) >= least


def test_what_puts_pairs_in_order_keeps_to_registers() -> None:
    route = {"logits": "*bf16", "chosen": "*i32", "weights": "*fp32", "num_experts": "i32"}
    group = {"chosen": "*i32", "order": "*i32", "pairs_until": "*i32", "num_pairs": "i32"}
    most = {"PAIRS": grouped_experts.MOST_AT_ONCE}
    cases: list[Kernel] = [
        (
            "engine.expert_kernels.route",
            route,
            {"PER_ROW": 8, "EXPERTS": 256, "SUMS_TO_ONE": True},
            {"num_warps": 1},
        ),
        ("engine.expert_kernels.group", group, most, {"num_warps": 4}),
    ]
    assert [found.spilled for found in compiled(cases)] == [0, 0]
