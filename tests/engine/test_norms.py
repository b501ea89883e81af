"""Norms by Triton, run by its interpreter on a CPU, against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.norms import normalised_by_triton

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this kernel on the GPU")


@pytest.mark.parametrize("has_gain", [False, True])
def test_norms_equal_those_of_torch(has_gain: bool) -> None:
    """Of some columns of a larger matrix, and of no rows."""
    torch.manual_seed(0)
    x = torch.randn(5, 100) * 3
    gain = torch.randn(90) if has_gain else None
    expected = F.rms_norm(x[:, :90], (90,), gain, 1e-5)
    torch.testing.assert_close(normalised_by_triton(x[:, :90], gain, 1e-5), expected)
    assert normalised_by_triton(x[:0], None, 1e-5).shape == (0, 100)
