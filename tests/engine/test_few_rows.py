"""Products of few rows, run by Triton's interpreter on a CPU, against torch; and compiled for GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.few_rows import Tile, multiply, normalised_by_triton, num_splits, tile_of
from tests.engine.compiling import Kernel, compiled

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these kernels on the GPU")
SMALL = Tile(16, 32, 4, 2)


@interpreted
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40),
    sizes=st.sampled_from([(16, 32), (40, 100), (64, 256), (24, 64)]),
    splits=st.sampled_from([1, 2, 4]),
    normed=st.booleans(),
    kind=st.sampled_from(["plain", "bias", "residual", "gated"]),
    seed=st.integers(0, 1000),
)
def test_products_equal_those_of_torch(
    rows: int, sizes: tuple[int, int], splits: int, normed: bool, kind: str, seed: int
) -> None:
    torch.manual_seed(seed)
    outputs, inputs = sizes
    x = torch.randn(rows, inputs).half()
    weight = (torch.randn(outputs * (2 if kind == "gated" else 1), inputs) * inputs**-0.5).half()
    bias, residual = torch.randn(outputs).half(), torch.randn(rows, outputs).half()
    eps = 1e-5 if normed else None
    wide = x.double()
    if normed:
        wide = F.rms_norm(wide, (inputs,), None, 1e-5)
    expected = wide @ weight.double().T
    if kind == "gated":
        expected = F.silu(expected[:, :outputs]) * expected[:, outputs:]
    expected += bias if kind == "bias" else residual if kind == "residual" else 0
    for _ in range(2):  # counters are as they were
        found = multiply(
            x,
            weight,
            bias=bias if kind == "bias" else None,
            residual=residual if kind == "residual" else None,
            eps=eps,
            gated=kind == "gated",
            tile=SMALL,
            splits=splits,
        )
        torch.testing.assert_close(found.double(), expected, atol=4e-3, rtol=2e-3)


@interpreted
@pytest.mark.parametrize("has_gain", [False, True])
def test_the_norm_equals_that_of_torch(has_gain: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 100) * 3
    gain = torch.randn(90) if has_gain else None
    expected = F.rms_norm(x[:, :90], (90,), gain, 1e-5)
    torch.testing.assert_close(normalised_by_triton(x[:, :90], gain, 1e-5), expected)


def test_splits_fill_a_gpu() -> None:
    """Of the 8B shape: query, key and value heads; out; output projection; one that cannot be split."""
    tile = tile_of(1)
    assert num_splits(6144, 4096, tile) == 2
    assert num_splits(4096, 4096, tile) == 2
    assert num_splits(2048, 2048, tile) == 4
    assert num_splits(128_256, 4096, tile) == 1
    assert num_splits(64, 128, tile) == 1


def test_kernels_compile_for_gpus() -> None:
    """Weights on their way while others are multiplied, no spilled register; nothing is run."""
    types = dict.fromkeys(("x", "weight", "bias", "residual", "out"), "*bf16")
    types |= {"partial": "*fp32", "squares": "*fp32", "counters": "*i32"}
    types |= dict.fromkeys(("num_rows", "outputs", "inputs", "x_stride", "split_blocks"), "i32")
    types |= {"eps": "fp32"}

    def product(rows: int, *, splits: int = 1, gated: bool = False) -> Kernel:
        tile = tile_of(rows)
        sizes = {"OUTPUTS": tile.outputs, "ROWS": rows, "INPUTS": tile.inputs, "SPLITS": splits}
        sizes |= {"IS_NORMED": True, "IS_GATED": gated, "HAS_BIAS": False, "HAS_RESIDUAL": splits > 1}
        return (
            "engine.few_rows_kernels.multiply",
            types,
            sizes,
            {"arch": 90, "num_warps": tile.warps, "num_stages": tile.stages},
        )

    norm = {"x": "*bf16", "gain": "*bf16", "out": "*bf16", "size": "i32", "x_stride": "i32", "eps": "fp32"}
    found = compiled(
        [
            *(product(rows, splits=2) for rows in (16, 64)),
            *(product(rows, gated=True) for rows in (16, 64)),
            ("engine.few_rows_kernels.normalise", norm, {"BLOCK": 4096, "HAS_GAIN": False}, {"num_warps": 8}),
        ]
    )
    for one in found:
        assert one.spilled == 0
    for one, programs in zip(found[:4], (2, 2, 1, 1), strict=True):
        assert "cp.async" in one.ptx
        assert "wgmma" in one.ptx
        assert one.fitting(227 << 10) >= programs
