"""Request decomposition: plans against brute force, attention against padded and plain softmax attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import decomposed_attention
from engine.attention import AttentionBackend, PaddedAttention, PaddedPlan
from engine.attention_kinds import make_attention
from engine.decomposed_attention import DecomposedAttention, DecomposedPlan, partial_attention
from engine.decomposition import (
    AttentionCost,
    Decomposition,
    cheapest,
    decompose,
    rectangle_padding,
    split_rows,
    stitch,
)
from engine.runner import Segment
from tests.engine.test_attention import random_segment
from tests.examples import examples

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=7)
NUM_SLOTS = 2048


def check(cut: Decomposition, lengths: list[int]) -> None:
    """Every key in exactly one piece, no two in one cell, the padding what is left."""
    cells = np.full((cut.num_rows, cut.row_length), -1)
    held = [np.zeros(length, dtype=int) for length in lengths]
    for segment, start, length, row, offset in zip(
        cut.segment, cut.start, cut.length, cut.row, cut.offset, strict=True
    ):
        assert length >= 1
        assert offset + length <= cut.row_length
        assert (cells[row, offset : offset + length] == -1).all()
        cells[row, offset : offset + length] = segment
        assert start + length <= lengths[segment]
        held[segment][start : start + length] += 1
    assert all((keys == 1).all() for keys in held)
    assert (cells != -1).any(axis=1).all()
    assert cut.padding == int((cells == -1).sum())
    order = list(zip(cut.segment.tolist(), cut.start.tolist(), strict=True))
    assert order == sorted(order)
    assert cut.is_split == (len(order) > len(lengths))


@given(lengths=LENGTHS, more=st.integers(0, 12))
def test_spins_search_equals_brute_force(lengths: list[int], more: int) -> None:
    num_rows = len(lengths) + more
    cut = decompose(lengths, num_rows)
    check(cut, lengths)
    assert (cut.offset == 0).all()
    paddings = []
    for row_length in range(1, max(lengths) + 1):
        rows = sum(math.ceil(length / row_length) for length in lengths)
        if rows <= num_rows:
            paddings.append(rows * row_length - sum(lengths))
    assert cut.num_rows <= num_rows
    assert cut.padding == min(paddings)
    assert cut.padding <= rectangle_padding(lengths)


@given(lengths=LENGTHS, more=st.integers(0, 12))
def test_stitched_rows_are_as_short_as_can_be(lengths: list[int], more: int) -> None:
    num_rows = len(lengths) + more
    cut = stitch(lengths, num_rows)
    check(cut, lengths)
    assert cut.num_rows <= num_rows
    assert np.bincount(cut.row).max() <= 2
    assert cut.padding <= rectangle_padding(lengths)
    if cut.is_split:
        assert cut.row_length == math.ceil(sum(lengths) / num_rows)
        assert cut.padding < cut.row_length + num_rows
    else:
        assert cut.padding <= math.ceil(sum(lengths) / num_rows) * num_rows - sum(lengths)


@given(
    lengths=LENGTHS,
    queries=st.integers(1, 9),
    merge=st.floats(0, 30),
    merging=st.floats(0, 200),
    shortest=st.integers(1, 30),
)
def test_cheapest_equals_brute_force(
    lengths: list[int], queries: int, merge: float, merging: float, shortest: int
) -> None:
    cost = AttentionCost(gather=3.0, group=100.0, merge=merge, merging=merging)
    cut, least = cheapest(lengths, queries, cost, shortest)
    check(cut, lengths)
    costs = []
    most = max(len(lengths), sum(math.ceil(length / shortest) for length in lengths))
    for row_length in range(1, max(lengths) + 1):
        rows = sum(math.ceil(length / row_length) for length in lengths)
        if rows <= most:
            total = 100.0 + rows * row_length * (queries + 3.0)
            costs.append(total + (merging + rows * queries * merge if rows > len(lengths) else 0.0))
    assert least == pytest.approx(min(costs))
    rows = cut.num_rows
    assert decompose(lengths, rows).padding <= cut.padding


def test_plans_refuse_what_cannot_be_placed() -> None:
    for plan in (decompose, stitch):
        with pytest.raises(ValueError, match="too few"):
            plan([3, 4], 1)
        for lengths in ([], [3, 0]):
            with pytest.raises(ValueError, match="at least one key"):
                plan(lengths, 5)


def test_the_padding_of_ragged_lengths_is_removed() -> None:
    rng = np.random.default_rng(0)
    for batch in (8, 16, 32):
        lengths = np.clip(rng.lognormal(np.log(512), 0.9, batch), 32, 2048).astype(int).tolist()
        without = rectangle_padding(lengths)
        assert decompose(lengths, 3 * batch).padding <= 0.2 * without
        assert stitch(lengths, batch).padding <= 0.01 * without
        cut, _ = cheapest(lengths, 5, decomposed_attention.COST, decomposed_attention.SHORTEST_ROW)
        assert cut.padding <= 0.2 * without


def ragged_batch(
    rng: np.random.Generator, shapes: list[tuple[int, int, str]], num_slots: int = NUM_SLOTS
) -> list[Segment]:
    """Segments of the given earlier tokens, rows and kinds of visibility, on scattered slots."""
    slots = rng.permutation(num_slots).astype(np.int32)
    segments, used = [], 0
    for past, rows, kind in shapes:
        segments.append(random_segment(rng, slots[used : used + past + rows], past, rows, kind))
        used += past + rows
    return segments


def softmax_attention(
    segment: Segment, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor
) -> torch.Tensor:
    """Plain softmax, float64 [rows, heads, v_dim]; keys and values of all slots, [num_slots, heads, dim]."""
    slots = np.concatenate([segment.past, segment.slots])
    rows, past = len(segment.slots), len(segment.past)
    seen = np.arange(len(slots)) <= past + np.arange(rows)[:, None]
    if segment.visible is not None:
        seen[:] = True
        seen[:, len(slots) - segment.visible.shape[1] :] = segment.visible
    shared = q.shape[1] // keys.shape[1]
    k = keys[slots].double().repeat_interleave(shared, dim=1)
    v = values[slots].double().repeat_interleave(shared, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[2] ** -0.5
    scores = scores.masked_fill(~torch.from_numpy(seen), -math.inf)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=2), v)


@examples(30)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 200), st.integers(1, 9), st.sampled_from(["causal", "tree", "wide"])),
        min_size=1,
        max_size=7,
    ),
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    v_dim=st.sampled_from([8, 6]),
    shortest=st.sampled_from([1, 5, 64]),
    stitched=st.booleans(),
    chunk_bytes=st.sampled_from([1, 4096, 4 << 20]),
    seed=st.integers(0, 1000),
)
def test_decomposed_attention_is_exact(
    shapes: list[tuple[int, int, str]],
    heads: tuple[int, int],
    v_dim: int,
    shortest: int,
    stitched: bool,
    chunk_bytes: int,
    seed: int,
) -> None:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    segments = ragged_batch(rng, shapes)
    num_rows = sum(len(segment.slots) for segment in segments)
    q_heads, kv_heads = heads
    q = torch.randn(num_rows, q_heads, 8, generator=generator, dtype=torch.float64)
    keys = torch.randn(NUM_SLOTS, kv_heads, 8, generator=generator, dtype=torch.float64)
    values = torch.randn(NUM_SLOTS, kv_heads, v_dim, generator=generator, dtype=torch.float64)
    everything = [Segment(s, s, s, s[:0]) for s in [np.arange(NUM_SLOTS, dtype=np.int32)]]
    expected = torch.cat(
        [
            softmax_attention(segment, keys, values, rows)
            for segment, rows in zip(segments, q.split([len(s.slots) for s in segments]), strict=True)
        ]
    ).flatten(1)
    cost = AttentionCost(gather=2, group=50, merge=0.1, merging=0)
    largest_score = float(q.norm(dim=2).max() * keys.norm(dim=2).max()) * 8**-0.5
    for dtype in (torch.float32, torch.float64):
        padded = PaddedAttention(NUM_SLOTS, dtype=dtype)
        decomposed = DecomposedAttention(NUM_SLOTS, dtype=dtype, stitched=stitched)
        decomposed.chunk_bytes = chunk_bytes
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decomposed_attention, "COST", cost)
            patch.setattr(decomposed_attention, "SHORTEST_ROW", shortest)
            plan = decomposed.plan(segments)
        results = []
        for attention, its_plan in ((padded, padded.plan(segments)), (decomposed, plan)):
            attention.allocate(0, kv_heads, 8, v_dim)
            kv = torch.cat([keys.flatten(1), values.flatten(1)], dim=1).to(dtype)
            attention.store(attention.plan(everything), 0, kv)
            results.append(attention.attend(its_plan, 0, q.to(dtype)))
        assert plan.key_tokens.real == sum(past + rows for past, rows, _ in shapes)
        assert plan.key_tokens.padding >= 0
        # A score is rounded in proportion to its size, and that is the relative error of its weight.
        rounding = 4 * torch.finfo(dtype).eps * (1.0 + largest_score)
        # Of values around 1, or relative to larger ones.
        bound = rounding * max(1.0, float(expected.abs().max()))
        assert float((results[1] - results[0]).abs().max()) <= bound
        assert float((results[1].double() - expected).abs().max()) <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stitched", [False, True])
def test_half_precision_is_as_close_as_padded(dtype: torch.dtype, stitched: bool) -> None:
    torch.manual_seed(0)
    shapes = [(700, 5, "tree"), (40, 3, "tree"), (300, 1, "causal"), (9, 5, "wide"), (500, 5, "causal")]
    segments = ragged_batch(np.random.default_rng(0), shapes)
    kv = torch.randn(NUM_SLOTS, 2 * 2 * 16).to(dtype)
    q = torch.randn(19, 6, 16).to(dtype)
    outputs = []
    for attention in (
        PaddedAttention(NUM_SLOTS, dtype=torch.float32),
        DecomposedAttention(NUM_SLOTS, dtype=dtype, stitched=stitched),
    ):
        attention.allocate(0, 2, 16, 16)
        slots = np.arange(NUM_SLOTS, dtype=np.int32)
        exact = attention.num_slots and not isinstance(attention, DecomposedAttention)
        attention.store(
            attention.plan([Segment(slots, slots, slots, slots[:0])]), 0, kv.float() if exact else kv
        )
        plan = attention.plan(segments)
        assert exact or (isinstance(plan, DecomposedPlan) and plan.decomposed)
        outputs.append(attention.attend(plan, 0, q.float() if exact else q).float())
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-2, rtol=1e-2)


def test_values_of_other_requests_cannot_leak() -> None:
    """A request whose values are not finite must not spoil the others, whatever shares the batch."""
    rng = np.random.default_rng(1)
    segments = ragged_batch(rng, [(600, 4, "tree"), (30, 4, "causal"), (400, 2, "tree")])
    attention = DecomposedAttention(NUM_SLOTS, dtype=torch.float32)
    attention.allocate(0, 1, 8, 8)
    kv = torch.randn(NUM_SLOTS, 16)
    kv[np.concatenate([segments[0].past, segments[0].slots])] = math.nan
    slots = np.arange(NUM_SLOTS, dtype=np.int32)
    attention.store(attention.plan([Segment(slots, slots, slots, slots[:0])]), 0, kv)
    plan = attention.plan(segments)
    assert isinstance(plan, DecomposedPlan)
    assert plan.decomposed
    assert torch.isfinite(attention.attend(plan, 0, torch.randn(10, 2, 8))[4:]).all()


def test_a_prompt_chunk_and_decoded_rows_are_cut_apart() -> None:
    shapes = [(0, 128, "causal"), (800, 1, "causal"), (90, 1, "causal"), (300, 1, "causal")]
    plan = DecomposedAttention(NUM_SLOTS, dtype=torch.float32).plan(
        ragged_batch(np.random.default_rng(0), shapes)
    )
    assert isinstance(plan, DecomposedPlan)
    assert [(group.segments, group.rows, group.keys) for group in plan.groups] == [(1, 128, 128)]
    assert [pieces.queries for pieces in plan.decomposed] == [1]


def test_auto_decomposes_only_what_that_makes_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = ragged_batch(
        np.random.default_rng(0), [(n, 1, "causal") for n in (500, 410, 320, 240, 150, 80)]
    )
    attention = make_attention("auto", NUM_SLOTS, dtype=torch.float32)
    dear, cheap = (AttentionCost(4, 1000, 1e9, 0), AttentionCost(4, 1000, 0, 0))
    monkeypatch.setattr(decomposed_attention, "COST", dear)
    plan = attention.plan(segments)
    assert type(plan) is PaddedPlan
    assert (
        plan.key_tokens == make_attention("padded", NUM_SLOTS, dtype=torch.float32).plan(segments).key_tokens
    )
    monkeypatch.setattr(decomposed_attention, "COST", cheap)
    assert isinstance(attention.plan(segments), DecomposedPlan)
    assert make_attention("auto", NUM_SLOTS, dtype=torch.float32).plan(segments[:1]).groups


def test_kinds_of_attention() -> None:
    backend: AttentionBackend[PaddedPlan] = make_attention("decomposed", 8, dtype=torch.float32)
    assert isinstance(backend, DecomposedAttention)
    assert type(make_attention("padded", 8, dtype=torch.float32)) is PaddedAttention
    with pytest.raises(ValueError, match="padded, decomposed, flashinfer, triton, auto"):
        make_attention("flash", 8, dtype=torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("v_dim", [16, 12])
def test_partial_attention_gives_the_logarithm_of_its_denominator(v_dim: int) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(3, 2, n, 16, dtype=torch.float64) for n in (5, 70))
    v = torch.randn(3, 2, 70, v_dim, dtype=torch.float64)
    mask = torch.where(torch.rand(3, 1, 5, 70) < 0.5, 0.0, -1e30).double()
    mask[0, 0, 1] = -1e30  # a query none of whose keys lie in the piece
    out, logarithms = partial_attention(q, k, v, mask, 0.3)
    scores = q @ k.transpose(2, 3) * 0.3 + mask
    torch.testing.assert_close(logarithms, torch.logsumexp(scores, 3), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, torch.softmax(scores, 3) @ v, rtol=1e-12, atol=1e-12)


def test_rows_of_one_segment_are_adjacent() -> None:
    cut = split_rows([5, 2, 4], 2)
    assert cut.row.tolist() == [0, 1, 2, 3, 4, 5]
    assert cut.segment.tolist() == [0, 0, 0, 1, 2, 2]
    assert cut.length.tolist() == [2, 2, 1, 2, 2, 2]
