"""Products of few rows on a GPU: those of torch in float64, and the same bits whenever they are asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.few_rows import multiply, normalised_by_triton, serves
from engine.linear import Linear
from tests import emulated_cuda

pytestmark = pytest.mark.skipif(
    emulated_cuda.IS_NEEDED, reason="without a GPU, tests/engine/test_few_rows.py"
)
EPS = 1e-5


@pytest.mark.parametrize("kind", ["plain", "normed", "residual", "gated"])
@pytest.mark.parametrize("sizes", [(6144, 4096), (4096, 14336), (1000, 2048), (72, 200)])
def test_products_equal_those_of_torch(sizes: tuple[int, int], kind: str, cuda: torch.device) -> None:
    outputs, inputs = sizes
    torch.manual_seed(0)
    lines = outputs * (2 if kind == "gated" else 1)
    weight = (torch.randn(lines, inputs, device=cuda) * inputs**-0.5).bfloat16()
    if not serves(weight):
        pytest.skip("measured on Hopper only, and left to cuBLAS elsewhere")
    for rows in (1, 7, 16, 17, 33, 64):
        x, residual = (torch.randn(rows, size, device=cuda).bfloat16() for size in (inputs, outputs))
        wide = x.double()
        if kind in ("normed", "gated"):
            wide = F.rms_norm(wide, (inputs,), None, EPS)
        expected = wide @ weight.double().T
        if kind == "gated":
            expected = F.silu(expected[:, :outputs]) * expected[:, outputs:]
        expected += residual if kind == "residual" else 0
        first = None
        for splits in [None] * 10 + [1, 2, 4]:
            found = multiply(
                x,
                weight,
                residual=residual if kind == "residual" else None,
                eps=EPS if kind in ("normed", "gated") else None,
                gated=kind == "gated",
                splits=splits,
            )
            error = float((found.double() - expected).norm() / expected.norm())
            assert error < 4e-3, (rows, splits, error)
            first = found if first is None else first
            assert splits is not None or torch.equal(found, first)


def test_rows_of_padding_change_no_others(cuda: torch.device) -> None:
    torch.manual_seed(0)
    linear = Linear(torch.randn(256, 512, device=cuda).bfloat16())
    if not linear.takes_few(3):
        pytest.skip("measured on Hopper only, and left to cuBLAS elsewhere")
    x = torch.randn(8, 512, device=cuda).bfloat16()
    expected = linear.of_normalised(x, EPS)
    x[5:] = torch.nan
    assert torch.equal(linear.of_normalised(x, EPS)[:5], expected[:5])


def test_the_norm_equals_that_of_torch(cuda: torch.device) -> None:
    torch.manual_seed(0)
    gain = torch.randn(4096, device=cuda).bfloat16()
    for rows in (1, 64, 1000):
        x = torch.randn(rows, 4096, device=cuda).bfloat16() * 3
        for one in (None, gain):
            expected = F.rms_norm(x.float(), (4096,), None if one is None else one.float(), EPS)
            torch.testing.assert_close(
                normalised_by_triton(x, one, EPS).float(), expected, atol=2e-2, rtol=8e-3
            )
