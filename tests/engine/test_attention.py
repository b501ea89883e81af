"""Paged tree attention against a dense computation, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention import PaddedAttention
from engine.runner import Segment
from engine.tree import ancestor_mask
from tests.examples import examples

NUM_SLOTS = 512


def random_segment(rng: np.random.Generator, slots: np.ndarray, past: int, rows: int, kind: str) -> Segment:
    visible = None
    if kind != "causal":
        parents = np.array([rng.integers(-1, node) if node else -1 for node in range(rows)], dtype=np.int32)
        visible = ancestor_mask(parents)
    if kind == "wide":
        # The first rows' keys are still uncommitted and some of them belong to other branches.
        before = rng.random((rows, int(rng.integers(0, past + 1)))) < 0.5
        visible = np.concatenate([before, visible], axis=1)
    return Segment(
        tokens=np.zeros(rows, dtype=np.int32),
        positions=np.zeros(rows, dtype=np.int32),
        slots=slots[past : past + rows],
        past=slots[:past],
        visible=visible,
    )


def dense(
    segment: Segment, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, scale: float
) -> torch.Tensor:
    """Output [rows, heads, v_dim] from all slots' keys and values [num_slots, kv_heads, dim]."""
    slots = np.concatenate([segment.past, segment.slots])
    rows, past = len(segment.slots), len(segment.past)
    out = torch.zeros(rows, q.shape[1], values.shape[2])
    shared = q.shape[1] // keys.shape[1]
    for row in range(rows):
        seen = np.arange(len(slots)) <= past + row
        if segment.visible is not None:
            recent = segment.visible.shape[1]
            seen = np.ones(len(slots), dtype=bool)
            seen[len(slots) - recent :] = segment.visible[row]
        chosen = slots[seen]
        for head in range(q.shape[1]):
            scores = keys[chosen, head // shared] @ q[row, head] * scale
            out[row, head] = torch.softmax(scores, 0) @ values[chosen, head // shared]
    return out


@examples(40)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 9), st.sampled_from(["causal", "tree", "wide"])),
        min_size=1,
        max_size=6,
    ),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    v_dim=st.sampled_from([8, 6]),
    shuffled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_equals_dense(
    shapes: list[tuple[int, int, str]], heads: tuple[int, int], v_dim: int, shuffled: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    q_heads, kv_heads = heads
    slots = (rng.permutation(NUM_SLOTS) if shuffled else np.arange(NUM_SLOTS)).astype(np.int32)
    segments, used = [], 0
    for past, rows, kind in shapes:
        segments.append(random_segment(rng, slots[used : used + past + rows], past, rows, kind))
        used += past + rows
    attention = PaddedAttention(NUM_SLOTS, dtype=torch.float32)
    keys, values = torch.zeros(NUM_SLOTS, kv_heads, 8), torch.zeros(NUM_SLOTS, kv_heads, v_dim)
    for layer in range(2):
        for segment in segments:
            for chosen in filter(len, (segment.past, segment.slots)):
                keys[chosen] = torch.randn(len(chosen), kv_heads, 8)
                values[chosen] = torch.randn(len(chosen), kv_heads, v_dim)
        earlier = [
            Segment(tokens=s.past, positions=s.past, slots=s.past, past=s.past[:0])
            for s in segments
            if len(s.past)
        ]
        for part in (earlier, segments):
            if not part:
                continue
            plan = attention.plan(part)
            written = np.concatenate([segment.slots for segment in part])
            q = torch.randn(len(written), q_heads, 8)
            out = attention.run(plan, layer, q, keys[written], values[written], scale=0.3)
        expected = [
            dense(segment, keys, values, rows, 0.3)
            for segment, rows in zip(segments, q.split([len(s.slots) for s in segments]), strict=True)
        ]
        torch.testing.assert_close(
            out.view(len(q), q_heads, v_dim), torch.cat(expected), atol=1e-5, rtol=1e-4
        )


def test_a_prompt_chunk_is_not_padded_together_with_decoded_rows() -> None:
    slots = np.arange(NUM_SLOTS, dtype=np.int32)
    decode = [Segment(slots[:1], slots[:1], slots[i * 40 + 39 :][:1], slots[i * 40 :][:39]) for i in range(6)]
    chunk = Segment(slots[:128], slots[:128], slots[300:428], slots[300:300])
    plan = PaddedAttention(NUM_SLOTS, dtype=torch.float32).plan([*decode[:3], chunk, *decode[3:]])
    assert sorted((group.segments, group.rows, group.keys) for group in plan.groups) == [
        (1, 128, 128),
        (6, 1, 40),
    ]


def test_values_of_other_requests_cannot_leak_through_padding() -> None:
    """A request whose values are not finite must not spoil the others in the batch."""
    slots = np.arange(NUM_SLOTS, dtype=np.int32)
    bad = Segment(slots[:1], slots[:1], slots[:1], slots[:0])
    good = Segment(slots[:3], slots[:3], slots[1:4], slots[:0])
    attention = PaddedAttention(NUM_SLOTS, dtype=torch.float32)
    k, v = torch.randn(4, 1, 8), torch.randn(4, 1, 8)
    v[0] = math.nan
    for batch, first in (([bad, good], 1), ([good, bad], 0)):
        order = [0, 1, 2, 3] if first else [1, 2, 3, 0]
        out = attention.run(attention.plan(batch), 0, torch.randn(4, 2, 8), k[order], v[order])
        assert torch.isfinite(out[first : first + 3]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_masks_stay_finite(dtype: torch.dtype) -> None:
    slots = np.arange(NUM_SLOTS, dtype=np.int32)
    attention = PaddedAttention(NUM_SLOTS, dtype=dtype)
    batch = [
        Segment(slots[:3], slots[:3], slots[1:4], slots[:0]),
        Segment(slots[:1], slots[:1], slots[9:10], slots[4:9]),
    ]
    rows = torch.randn(4, 1, 8, dtype=dtype)
    assert torch.isfinite(attention.run(attention.plan(batch), 0, rows, rows, rows)).all()
