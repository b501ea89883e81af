"""Norms by Triton, run by its interpreter on a CPU, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.attention import PaddedAttention
from engine.gated import gate, gate_by_triton
from engine.norms import PendingNorm, normalised_by_triton
from engine.runner import Segment
from engine.triton_attention import TritonAttention

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


def test_gates_of_a_product_are_those_of_normalised_rows() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 96) * 3, torch.randn(96, 2 * 1100) / 10
    expected = gate(F.rms_norm(x, (96,), None, 1e-5) @ weight)
    torch.testing.assert_close(
        gate_by_triton(x @ weight, PendingNorm(x, 1e-5)), expected, atol=1e-4, rtol=1e-4
    )


def test_heads_of_a_product_are_those_of_normalised_rows() -> None:
    """Of queries, which are rotated in place, and of keys and values, which are stored."""
    rows, size, heads, kv_heads, dim = 4, 96, 6, 2, 16
    torch.manual_seed(0)
    x, weight = torch.randn(rows, size) * 3, torch.randn(size, (heads + 2 * kv_heads) * dim) / 10
    angle = torch.rand(rows, 1, dim // 2) * 7
    rotation = torch.polar(torch.ones_like(angle), angle)
    slots = np.array([5, 0, 7, 2], dtype=np.int32)
    segment = Segment(slots, slots, slots, slots[:0])
    padded = PaddedAttention(8, dtype=torch.float32)
    by_triton = TritonAttention(8, dtype=torch.float32, device="cpu")
    for attention in (padded, by_triton):
        attention.allocate(0, kv_heads, dim, dim)
    expected, found = F.rms_norm(x, (size,), None, 1e-5) @ weight, x @ weight
    padded.store_rotated(padded.plan([segment]), 0, expected, rotation, heads)
    by_triton.store_rotated(by_triton.plan([segment]), 0, found, rotation, heads, PendingNorm(x, 1e-5))
    torch.testing.assert_close(by_triton.storage(0), padded.storage(0), atol=1e-4, rtol=1e-4)
    queries = heads * dim
    torch.testing.assert_close(found[:, :queries], expected[:, :queries], atol=1e-4, rtol=1e-4)
