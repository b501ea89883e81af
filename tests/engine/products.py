"""Products with quantized weights, held against float64."""

from __future__ import annotations

import torch

from engine.tiled_product import TiledProduct


def check_product(
    product: TiledProduct,
    wide: torch.Tensor,
    *,
    rows: int,
    dtype: torch.dtype,
    has_bias: bool,
    has_residual: bool,
    seed: int,
) -> None:
    """Multiply random rows of `dtype` and compare with the matrix `wide`, float64 [outputs, inputs]."""
    outputs, inputs = wide.shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + 3, generator=generator).to(dtype)[:, :inputs]  # rows are apart
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    residual = torch.randn(rows, outputs, generator=generator).to(dtype) if has_residual else None
    got = product(x, bias, residual)
    expected = x.double() @ wide.T
    size_of_sums = x.double().abs() @ wide.T.abs()
    expected = expected if bias is None else expected + bias
    expected = expected if residual is None else expected + residual
    assert got.dtype == dtype
    # Sums are float32; only the result is rounded to float16.
    last = 1e-7 if dtype == torch.float32 else 6e-4
    is_near = (got - expected).abs() <= 2e-6 * (1 + size_of_sums) + last * expected.abs()
    assert bool((is_near | (expected.abs() > torch.finfo(dtype).max)).all())
