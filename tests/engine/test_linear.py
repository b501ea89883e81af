"""Products with constant weights: every layout against float64, and which weights take half the bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import linear
from engine.linear import Linear
from tests.examples import examples


def numbers(shape: tuple[int, ...], seed: int, spread: float = 0.05) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def expected(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    """In float64, where rounding is far below what is compared."""
    rows = x.double() if scale is None else x.double() * scale.double()
    product = rows @ weight.double().t()
    return product if bias is None else product + bias.double()


def check(map_: Linear, x: torch.Tensor, reference: torch.Tensor) -> None:
    got = map_(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), reference, atol=2e-4, rtol=1e-5)
    residual = numbers(tuple(got.shape), 9)
    torch.testing.assert_close(
        map_.add_to(residual, x).double(), reference + residual.double(), atol=2e-4, rtol=1e-5
    )


@examples()  # kernels are compiled as they are met
@given(
    rows=st.integers(0, 70),
    inputs=st.integers(1, 130),
    outputs=st.integers(1, 130),
    with_bias=st.booleans(),
    with_scale=st.booleans(),
    kind=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**16),
)
def test_products_equal_those_in_double_precision(
    rows: int,
    inputs: int,
    outputs: int,
    with_bias: bool,
    with_scale: bool,
    kind: torch.dtype,
    seed: int,
) -> None:
    weight = numbers((outputs, inputs), seed).to(kind).float()
    bias = numbers((outputs,), seed + 1) if with_bias else None
    scale = numbers((inputs,), seed + 2, 2.0) if with_scale else None
    x = numbers((rows, inputs), seed + 3, 1.0)
    check(Linear(weight, bias, scale), x, expected(x, weight, bias, scale))


def is_half(weight: torch.Tensor) -> bool:
    return linear._as_half(weight) is not None


def test_weights_are_kept_in_half_the_bytes_only_if_no_bit_of_them_is_lost() -> None:
    weight = numbers((64, 48), 1)
    assert not is_half(weight), "float32 numbers"
    assert is_half(weight.half().float())
    assert is_half(weight.bfloat16().float())
    assert is_half(torch.zeros(8, 8))
    small = weight.bfloat16().float()
    small[3, 5] = 2.0**-30  # below float16, but not when all are made larger
    assert is_half(small)
    large = torch.full((8, 8), 0.5)
    large[0, 0] = 2.0**20
    assert is_half(large), "made smaller"
    wide = small.clone()
    wide[3, 5] = 2.0**-60
    assert not is_half(wide), "no power of two fits both ends"
    wide[3, 5] = float("inf")
    assert not is_half(wide)
    tiny = weight.bfloat16().float() * 2.0**-100
    assert not is_half(tiny), "inputs would have to be made too small"
    x = numbers((2, 48), 3, 2.0**30)
    exact = x @ tiny.t()
    torch.testing.assert_close(Linear(tiny)(x), exact, atol=1e-5 * float(exact.abs().max()), rtol=1e-5)


def test_half_the_bytes_are_used_wherever_there_is_a_kernel() -> None:
    weight = numbers((64, 48), 1)
    has_kernel = linear._half_kernel(torch.get_num_threads()) is not None
    assert has_kernel == ("fbgemm" in torch.backends.quantized.supported_engines)
    assert (Linear(weight.half().float())._half is not None) == has_kernel
    assert (Linear(weight.bfloat16().float())._half is not None) == has_kernel
    assert Linear(weight)._half is None
    assert Linear(weight.bfloat16())._half is None, "computed with in bfloat16"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_small_and_large_numbers_come_out_exactly(threads: int, kind: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight = torch.tensor([[2.0**-9, 0.0], [1.5, -(2.0**-20)], [0.0, 2.0**-14]]).to(kind).float()
        x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
        assert torch.equal(Linear(weight)(x), x @ weight.t())
    finally:
        torch.set_num_threads(before)


def test_without_the_kernels_other_layouts_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers((96, 64), 4).half().float()
    scale, x = numbers((64,), 5, 1.0), numbers((7, 64), 6, 1.0)
    monkeypatch.setattr(linear, "_half_kernel", lambda _: None)
    fallback = Linear(weight, None, scale)
    assert fallback._half is None
    check(fallback, x, expected(x, weight, None, scale))


def test_without_the_deprecated_kernel_the_other_one_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers((96, 64), 4).half().float()
    x = numbers((7, 64), 6, 1.0)
    monkeypatch.delattr(torch, "fbgemm_linear_fp16_weight_fp32_activation", raising=False)
    linear._half_kernel.cache_clear()
    try:
        check(Linear(weight), x, expected(x, weight, None, None))
        assert linear._half_kernel(1) in (None, linear._many_threads)
    finally:
        linear._half_kernel.cache_clear()


def test_a_product_depends_on_its_own_row_only() -> None:
    map_ = Linear(numbers((40, 24), 7).half().float())
    x = numbers((9, 24), 8, 1.0)
    whole = map_(x)
    for row in range(9):
        torch.testing.assert_close(map_(x[row : row + 1])[0], whole[row], atol=1e-6, rtol=1e-5)
