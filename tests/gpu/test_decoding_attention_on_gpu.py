"""Attention of plain decoding, which rotates and stores keys itself, on a GPU: equal to two launches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.norms import PendingNorm
from engine.runner import Segment
from engine.triton_attention import TritonAttention
from tests import emulated_cuda

# The interpreter rounds small numbers to bfloat16 wrongly; it runs tests/engine/test_rotating_attention.py.
pytestmark = pytest.mark.skipif(emulated_cuda.IS_NEEDED, reason="needs a GPU, for bfloat16")
SLOTS, HEADS, KV_HEADS, SIZE = 3000, 8, 2, 512


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.bfloat16, 64), (torch.float32, 64)])
@pytest.mark.parametrize("requests", [1, 4, 24])
@pytest.mark.parametrize("has_norm", [False, True])
def test_one_launch_equals_two(
    dtype: torch.dtype, dim: int, requests: int, has_norm: bool, cuda: torch.device
) -> None:
    torch.manual_seed(0)
    slots = np.random.default_rng(0).permutation(SLOTS).astype(np.int32).reshape(requests, -1)
    segments = [
        Segment(of[:1], of[:1], of[past : past + 1], of[:past])
        for past, of in zip(range(100, 100 - requests, -1), slots, strict=True)
    ]
    ways = [TritonAttention(SLOTS, dtype=dtype, device=cuda) for _ in range(2)]
    before = torch.randn(SLOTS, 2 * KV_HEADS * dim, dtype=dtype, device=cuda)
    for attention in ways:
        attention.allocate(0, KV_HEADS, dim, dim)
        attention.storage(0).copy_(before)
    x = torch.randn(requests, SIZE, dtype=dtype, device=cuda)
    qkv = torch.randn(requests, (HEADS + 2 * KV_HEADS) * dim, dtype=dtype, device=cuda)
    angle = torch.rand(requests, 1, dim // 2, device=cuda) * 7
    rotation = torch.polar(torch.ones_like(angle), angle)
    norm = PendingNorm(x, 1e-5) if has_norm else None
    one, two = ways
    found = one.attend_rotated(one.plan(segments), 0, qkv.clone(), rotation, HEADS, None, norm)
    plan = two.plan(segments)
    two.store_rotated(plan, 0, qkv, rotation, HEADS, norm)
    queries = qkv[:, : HEADS * dim].view(requests, HEADS, dim)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, two.attend(plan, 0, queries), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(one.storage(0), two.storage(0), atol=tolerance, rtol=tolerance)
