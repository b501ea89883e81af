"""Weights of eight bits: what they are, parts of them, and products by Triton's interpreter and for GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import fp8_product, tiled_product
from engine.fp8 import Fp8Weight, concatenated, quantized, stored
from engine.fp8_product import Fp8Product
from engine.linear import Linear
from engine.quantized_linear import make_linear
from engine.tiled_product import num_splits, tile_of
from tests.engine.compiling import Kernel, compiled
from tests.engine.products import check_product
from tests.examples import examples

CPU = torch.device("cpu")


def values_of_e4m3() -> np.ndarray[Any, np.dtype[np.float64]]:
    """By their definition (arXiv 2209.05433, section 3): a sign, four bits of exponent, three of fraction."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -size, size)


VALUES = values_of_e4m3()


def random_weight(outputs: int, inputs: int, block: int, seed: int) -> Fp8Weight:
    """Of all numbers alike, but for those that are none, with scales of several sizes."""
    rng = np.random.default_rng(seed)
    numbers = rng.choice(np.flatnonzero(~np.isnan(VALUES)), (outputs, inputs)).astype(np.uint8)
    scales = 2.0 ** rng.uniform(-12, 2, (outputs, -(-inputs // block)))
    return Fp8Weight(torch.from_numpy(numbers), torch.from_numpy(scales.astype(np.float32)), block)


sizes = st.tuples(st.sampled_from([1, 7, 64, 130, 256]), st.sampled_from([16, 40, 128, 200, 384]))


@given(size=sizes, block=st.sampled_from([16, 64, 128]), seed=st.integers(0, 99))
def test_numbers_mean_what_the_format_says(size: tuple[int, int], block: int, seed: int) -> None:
    weight = random_weight(*size, block, seed)
    scales = weight.scales.numpy().astype(np.float64)[:, np.arange(size[1]) // block]
    expected = VALUES[weight.numbers.numpy()] * scales
    np.testing.assert_allclose(weight.dequantized(torch.float32).numpy(), expected, rtol=6e-8)


@examples(25)
@given(size=sizes, seed=st.integers(0, 99), gain=st.sampled_from([1e-6, 0.02, 300.0]))
def test_quantized_weights_are_the_nearest(size: tuple[int, int], seed: int, gain: float) -> None:
    weight = torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * gain
    weight[0, :3] = 0.0
    found = quantized(weight)
    assert not torch.isnan(found.dequantized(torch.float32)).any()
    scales = found.scales.repeat_interleave(128, dim=1)[:, : size[1]]
    exact = (weight / scales).numpy()  # quotients round alike here and there
    finite = VALUES[~np.isnan(VALUES)]
    nearest = np.abs(exact[..., None] - finite).min(-1)
    chosen = np.abs(exact - VALUES[found.numbers.numpy()])
    np.testing.assert_allclose(chosen, nearest, atol=1e-12)
    tiles = np.abs(exact[:128, :128])
    assert tiles.max() == pytest.approx(448.0, rel=1e-6) or not tiles.max()


@given(size=sizes, block=st.sampled_from([16, 64, 128]), seed=st.integers(0, 99), data=st.data())
def test_parts_are_those_of_the_matrix(
    size: tuple[int, int], block: int, seed: int, data: st.DataObject
) -> None:
    weight = random_weight(*size, block, seed)
    whole = weight.dequantized(torch.float32)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, size[1] // 8)] * 2)))
    start, stop = start * 8, stop * 8 + 8
    part = weight.columns(start, stop)
    assert torch.equal(part.dequantized(torch.float32), whole[:, start:stop])
    order = torch.randperm(size[0], generator=torch.Generator().manual_seed(seed))
    assert torch.equal(weight.rows(order).dequantized(torch.float32), whole[order])
    other = random_weight(5, size[1], data.draw(st.sampled_from([32, 128])), seed + 1)
    both = torch.cat([whole, other.dequantized(torch.float32)])
    assert torch.equal(concatenated([weight, other]).dequantized(torch.float32), both)


def test_scales_are_told_apart_by_their_shape() -> None:
    numbers = torch.zeros(48, 40).to(torch.float8_e4m3fn)
    assert stored(numbers, torch.tensor(2.0)).scales.tolist() == [[2.0]] * 48
    each = torch.arange(48.0).bfloat16()
    assert stored(numbers, each[:, None]).scales.tolist() == [[float(i)] for i in range(48)]
    blocks = stored(numbers, torch.arange(9.0).view(3, 3), (16, 16))
    assert (blocks.block, blocks.scales[17].tolist()) == (16, [3.0, 4.0, 5.0])
    with pytest.raises(ValueError, match=r"scales \[3, 3\] fit no weight \[48, 40\] in blocks of 128 by 128"):
        stored(numbers, torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"not a matrix of float8_e4m3fn: torch.float32 \[3, 3\]"):
        stored(torch.zeros(3, 3), torch.ones(1))


def test_weights_are_widened_where_no_kernel_takes_them() -> None:
    weight = random_weight(64, 200, 128, 0)
    x, scale = torch.randn(3, 200), torch.rand(200)
    linear = make_linear(weight, None, scale, dtype=torch.float32)
    assert isinstance(linear, Linear)
    assert linear.gain is None
    torch.testing.assert_close(
        linear(x), x * scale @ weight.dequantized(torch.float32).T, rtol=1e-4, atol=1e-2
    )


# -- the kernel ---------------------------------------------------------------------------------------------

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these kernels on the GPU")


@interpreted
@pytest.mark.parametrize("native", [True, False])
def test_every_number_is_widened_exactly(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_product, "_is_native", lambda device: native)
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[[127, 255]] = 0
    weight = Fp8Weight(numbers.view(16, 16), torch.ones(16, 1), 16)
    got = Fp8Product(weight)(torch.eye(16)).T.reshape(-1)
    expected = torch.from_numpy(np.where(np.isnan(VALUES), 0.0, VALUES)).float()
    assert torch.equal(got, expected)


@interpreted
@examples(20)
@given(
    size=sizes,
    block=st.sampled_from([16, 128, 1000]),
    rows=st.sampled_from([1, 3, 16, 17, 33]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    native=st.booleans(),
    programs=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_widened_matrix(
    size: tuple[int, int],
    block: int,
    rows: int,
    dtype: torch.dtype,
    has_bias: bool,
    has_residual: bool,
    native: bool,
    programs: int,
    seed: int,
) -> None:
    outputs, inputs = size
    weight = random_weight(outputs, inputs, min(block, inputs), seed)
    if block == 128:  # all outputs of a block have one scale, as in checkpoints
        weight = Fp8Weight(weight.numbers, weight.scales[[0] * outputs], weight.block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled_product, "ENOUGH_PROGRAMS", programs)
        patch.setattr(fp8_product, "_is_native", lambda device: native)
        check_product(
            Fp8Product(weight),
            weight.dequantized(torch.float32).double(),
            rows=rows,
            dtype=dtype,
            has_bias=has_bias,
            has_residual=has_residual,
            seed=seed,
        )


def test_sums_are_split_by_the_weight_alone() -> None:
    """A large GPU has work for small matrices, and large ones are not split for nothing."""
    assert num_splits(4096, 32) == 8
    assert num_splits(28672, 32) == 1
    assert num_splits(64, 2) == 2
    assert [tile_of(rows, torch.bfloat16).rows for rows in (1, 16, 17, 64, 65, 5000)] == [
        16,
        16,
        32,
        64,
        128,
        128,
    ]
    assert tile_of(5000, torch.float32).rows == 32


def test_blocks_the_kernel_does_not_take_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a scale per 8 of 32 inputs: the kernel takes powers of two from 16"
    ):
        Fp8Product(random_weight(16, 32, 8, 0))
    with pytest.raises(ValueError, match="a scale per 24 of 96 inputs"):
        Fp8Product(random_weight(16, 96, 24, 0))


@pytest.mark.thorough
@interpreted
def test_kernels_compile_for_gpus() -> None:
    """Without registers spilled to memory but for float32, by Triton's compiler; nothing is run."""
    types = dict.fromkeys(("x", "numbers", "scales", "bias", "residual", "out"), "*bf16")
    types |= {"numbers": "*u8", "scales": "*fp32"}
    types |= dict.fromkeys(("num_rows", "outputs", "inputs", "x_stride", "split_blocks"), "i32")

    def product(
        rows: int, arch: int, *, blocked: bool = True, native: bool = True, dtype: str = "bf16"
    ) -> Kernel:
        tile = tile_of(rows, torch.float32 if dtype == "fp32" else torch.bfloat16)
        split = rows <= tiled_product.SPLIT_ROWS
        pointers = {name: f"*{dtype}" if kind == "*bf16" else kind for name, kind in types.items()}
        constants: dict[str, Any] = {"OUTPUTS": tile.outputs, "ROWS": tile.rows, "INPUTS": 128}
        constants |= {"GROUP": 128 if blocked else 1, "IS_BLOCKED": blocked, "IS_NATIVE": native}
        constants |= {"IS_SPLIT": split, "HAS_BIAS": False, "HAS_RESIDUAL": not split}
        return (
            "engine.fp8_kernels.multiply",
            pointers | ({"out": "*fp32"} if split else {}),
            constants,
            {"arch": arch, "num_warps": tile.warps, "num_stages": tile.stages},
        )

    sums = {
        "partial": "*fp32",
        "bias": "*bf16",
        "residual": "*bf16",
        "out": "*bf16",
        "size": "i32",
        "outputs": "i32",
    }
    found = compiled(
        [
            *(product(rows, 90) for rows in (1, 32, 64, 512)),
            product(1, 90, blocked=False),
            product(32, 90, dtype="fp32"),
            *(product(rows, 80, native=False) for rows in (1, 512)),
            (
                "engine.product_kernels.add_splits",
                sums,
                {"SPLITS": 8, "BLOCK": 1024, "HAS_BIAS": False, "HAS_RESIDUAL": True},
                {"num_warps": 4},
            ),
        ]
    )
    for number, one in enumerate(found):
        assert one.spilled == 0 or number == 5
        # What a block may have: on Hopper, and on the smallest of the others (A10, L4, RTX).
        assert one.shared <= (227 if number < 6 else 99) * 1024
    for one in found[:6]:  # by the device's own conversion, from numbers that were on their way meanwhile
        assert "cvt.rn.f16x2.e4m3x2" in one.ptx
        assert "cp.async" in one.ptx
    assert "wgmma" in found[3].ptx
    assert "mma.sync" in found[0].ptx
    assert "wgmma" not in found[0].ptx
    assert not any("e4m3" in one.ptx for one in found[6:8])
