"""Attention that rotates and stores keys itself, run by Triton's interpreter, against two launches."""

from __future__ import annotations

from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from engine import attention_tiles
from engine.attention import PaddedAttention
from engine.norms import PendingNorm
from engine.runner import Segment
from engine.triton_attention import TritonAttention
from tests.engine.test_attention import random_segment
from tests.examples import examples

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this kernel on the GPU")

SLOTS, SIZE = 400, 24


def make(kv_heads: int, dim: int) -> tuple[PaddedAttention, TritonAttention]:
    """By torch and by Triton, with the same keys and values of what came before."""
    padded = PaddedAttention(SLOTS, dtype=torch.float32)
    by_triton = TritonAttention(SLOTS, dtype=torch.float32, device="cpu")
    for attention in (padded, by_triton):
        attention.allocate(0, kv_heads, dim, dim)
    padded.storage(0).normal_()
    by_triton.storage(0).copy_(padded.storage(0))
    return padded, by_triton


def rotations(rows: int, dim: int) -> torch.Tensor:
    """Of as many rows, any angles."""
    angle = torch.rand(rows, 1, dim // 2) * 7
    return torch.polar(torch.ones_like(angle), angle)


@examples(20)
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=4) | st.sampled_from([[1], [1, 1, 1]]),
    kind=st.sampled_from(["causal", "tree", "wide"]),
    shared=st.integers(1, 4),
    dim=st.sampled_from([16, 24]),
    programs=st.sampled_from([1, 64]),
    has_norm=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_equals_rotating_storing_and_attending(
    rows: list[int], kind: str, shared: int, dim: int, programs: int, has_norm: bool, seed: int
) -> None:
    """Of chunks, single rows and trees, with keys split and not, normalised before or not."""
    rng, kv_heads = np.random.default_rng(seed), 2
    torch.manual_seed(seed)
    slots = np.split(rng.permutation(SLOTS).astype(np.int32), 4)
    segments = [
        random_segment(rng, free, int(rng.integers(0, 60)), number, kind)
        for free, number in zip(slots, rows, strict=False)
    ]
    padded, by_triton = make(kv_heads, dim)
    heads = kv_heads * shared
    x, weight = torch.randn(sum(rows), SIZE) * 3, torch.randn(SIZE, (heads + 2 * kv_heads) * dim) / 5
    rotation = rotations(sum(rows), dim)
    given_rows = F.rms_norm(x, (SIZE,), None, 1e-5) if has_norm else x
    expected = padded.attend_rotated(padded.plan(segments), 0, given_rows @ weight, rotation, heads)
    norm = PendingNorm(x, 1e-5) if has_norm else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tiles, "ENOUGH_PROGRAMS", programs)
        plan = by_triton.plan(segments)
        found = by_triton.attend_rotated(plan, 0, x @ weight, rotation, heads, None, norm)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(by_triton.storage(0), padded.storage(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "has_norm", "launches"),
    [(1, False, 1), (1, True, 1), (2, False, 2), (8, True, 2)],
)
def test_it_is_one_launch_where_requests_have_one_row(rows: int, has_norm: bool, launches: int) -> None:
    attention = TritonAttention(SLOTS, dtype=torch.bfloat16, device="cpu")
    attention.allocate(0, 1, 16, 16)
    kernels = attention._kernels = attention._row_kernels = MagicMock()
    slots = np.arange(rows, dtype=np.int32)
    plan = attention.plan([Segment(slots, slots, slots, slots[:0])])
    x = torch.randn(rows, SIZE, dtype=torch.bfloat16)
    norm = PendingNorm(x, 1e-5) if has_norm else None
    attention.attend_rotated(
        plan, 0, torch.randn(rows, 4 * 16).bfloat16(), rotations(rows, 16), 2, None, norm
    )
    launched = [name for name, _, _ in kernels.mock_calls if name.endswith("__getitem__()")]
    assert len(launched) == launches


def test_rows_of_nobody_bring_no_keys() -> None:
    """As in a captured layer, whose table has rows without keys for requests of nobody."""
    _, attention = make(1, 16)
    before = attention.storage(0).clone()
    slots = np.array([3], dtype=np.int32)
    plan = attention.plan([Segment(slots, slots, slots, slots[:0])])
    plan.table.segments[3:5] = 0
    out = attention.attend_rotated(plan, 0, torch.randn(1, 3 * 16), rotations(1, 16), 1)
    assert not out.any()
    torch.testing.assert_close(attention.storage(0), before)
