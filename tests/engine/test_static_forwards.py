"""Forwards of a fixed shape, as CUDA graphs replay them, against ordinary ones: all but the capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import cuda_graphs
from engine.captured_shapes import CAPTURE_AT, CAPTURE_AT_BESIDE, CapturedShapes
from engine.cuda_graphs import MOST_SHAPES, GraphedRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import LlamaWeights, load_llama_weights
from engine.padded_segments import (
    MOST_PROMPT_ROWS,
    MOST_TREE_ROWS,
    Shape,
    pad_rows,
    rounded,
    rounded_keys,
    shape_of,
)
from engine.runner import Segment
from engine.warm_up import new_requests, usual_batches
from tests.engine import tiny_models
from tests.engine.test_attention import random_segment
from tests.examples import examples

SLOTS = 600


@pytest.fixture(scope="module")
def weights() -> LlamaWeights:
    return load_llama_weights(tiny_models.build("llama"))


def batch(
    rng: np.random.Generator, shapes: Sequence[tuple[int, int, str]], slots: np.ndarray
) -> list[Segment]:
    segments, used = [], 0
    for past, rows, kind in shapes:
        plain = random_segment(rng, slots[used : used + past + rows], past, rows, kind)
        segments.append(
            Segment(
                tokens=rng.integers(0, tiny_models.VOCABULARY, rows).astype(np.int32),
                positions=rng.integers(0, 100, rows).astype(np.int32),
                slots=plain.slots,
                past=plain.past,
                visible=plain.visible,
            )
        )
        used += past + rows
    return segments


@examples(25)
@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.integers(0, 30), st.integers(1, 9), st.sampled_from(["causal", "tree", "wide"])),
            min_size=1,
            max_size=5,
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
def test_padded_forwards_equal_ordinary_ones(
    weights: LlamaWeights, steps: list[list[tuple[int, int, str]]], seed: int
) -> None:
    """Several batches one after the other: nothing of one may be seen in the next of the same shape."""
    rng = np.random.default_rng(seed)
    plain = LlamaRunner(weights, SLOTS)
    static = GraphedRunner(LlamaRunner(weights, SLOTS + 1), capture_at=1)
    assert static.num_slots == SLOTS
    for shapes in steps:
        segments = batch(rng, shapes, rng.permutation(SLOTS).astype(np.int32))
        total = sum(len(segment.slots) for segment in segments)
        keep = np.sort(rng.choice(total, int(rng.integers(1, total + 1)), replace=False)).astype(np.int32)
        expected = plain.forward(segments, keep)
        got = static.forward(segments, keep)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        rows = np.arange(len(keep), dtype=np.int32)
        torch.testing.assert_close(static.last_hidden(rows), plain.last_hidden(rows), atol=1e-4, rtol=1e-4)
        assert static.key_tokens.real == plain.key_tokens.real
    met = {shape_of(batch(rng, s, np.arange(SLOTS)), with_keys=True) for s in steps}
    assert set(static.shapes) <= met
    assert all(any(one == shape or one.serves(shape) for one in static.shapes) for shape in met)


def test_no_request_reads_another_or_the_padding(weights: LlamaWeights) -> None:
    """Keys and values that are not finite, in a neighbour's slots and in the scratch slot, spoil nobody."""
    runner = LlamaRunner(weights, 41)
    static = GraphedRunner(runner, capture_at=1)
    slots = np.arange(40, dtype=np.int32)
    rng = np.random.default_rng(0)
    good, bad = batch(rng, [(6, 3, "tree"), (5, 1, "causal")], slots)
    third = batch(rng, [(4, 2, "causal")], slots[20:])[0]
    plain = LlamaRunner(weights, 40)
    expected = [
        plain.forward([segment], np.arange(len(segment.slots), dtype=np.int32)) for segment in (good, third)
    ]
    for layer in range(2):
        storage = runner.attention._layers[layer]
        storage[torch.from_numpy(bad.past).long()] = torch.nan
        storage[40] = torch.nan
    out = static.forward([good, bad, third], np.arange(6, dtype=np.int32))
    torch.testing.assert_close(out[:3], expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out[4:], expected[1], atol=1e-4, rtol=1e-4)
    assert out[3].isnan().all()


def test_what_is_captured(weights: LlamaWeights) -> None:
    static = GraphedRunner(LlamaRunner(weights, SLOTS + 1))
    slots = np.arange(SLOTS, dtype=np.int32)
    rng = np.random.default_rng(0)
    one = batch(rng, [(10, 1, "causal")], slots)
    keep = np.zeros(1, dtype=np.int32)
    static.forward(one, keep)
    assert static.shapes == []  # a shape that comes once is not worth it
    static.forward(one, keep)
    assert static.shapes == [Shape(1, 1, 256)]
    prompt = batch(rng, [(0, MOST_TREE_ROWS + 1, "causal")], slots)
    for _ in range(3):
        static.forward(prompt, keep)
        static.forward(one, keep[:0])
    assert static.shapes == [Shape(1, 1, 256)]


def test_what_has_no_workspace_is_not_captured(
    weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cuda_graphs.has_workspace", lambda attention, shape, heads: shape.rows < 2)
    static = GraphedRunner(LlamaRunner(weights, SLOTS + 1), capture_at=1)
    for rows in (2, 1):
        segments = batch(np.random.default_rng(0), [(10, rows, "causal")], np.arange(SLOTS, dtype=np.int32))
        static.forward(segments, np.arange(rows, dtype=np.int32))
    assert static.shapes == [Shape(1, 1, 256)]


def test_what_comes_seldom_is_padded_to_what_is_captured(weights: LlamaWeights) -> None:
    """A capture takes as long as ten forwards, and whoever is in the batch waits for it."""
    static = GraphedRunner(LlamaRunner(weights, SLOTS + 1), capture_at=1)
    plain = LlamaRunner(weights, SLOTS)
    rng = np.random.default_rng(0)
    keep = np.arange(8, dtype=np.int32)
    large = batch(rng, [(10, 4, "causal"), (9, 4, "tree")], np.arange(SLOTS, dtype=np.int32))
    for runner in (static, plain):
        runner.forward(large, keep)
    assert static.shapes == [Shape(2, 4, 256)]
    small = batch(rng, [(10, 2, "tree"), (20, 1, "causal")], np.arange(SLOTS, dtype=np.int32))
    for _ in range(CAPTURE_AT_BESIDE // CAPTURE_AT):  # padded to one, until it has come often
        assert static.shapes == [Shape(2, 4, 256)]
        got, expected = static.forward(small, keep[:3]), plain.forward(small, keep[:3])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert static.shapes == [Shape(2, 4, 256), Shape(2, 2, 256)]


@pytest.mark.parametrize("without", ["_compute", "_Static"])
def test_where_memory_runs_out_nothing_is_padded_to_what_was_not_captured(
    without: str, weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything captured later: it would run out again, in the midst of serving."""
    static = GraphedRunner(LlamaRunner(weights, SLOTS + 1), capture_at=1)
    plain = LlamaRunner(weights, SLOTS)
    rng, slots = np.random.default_rng(0), np.arange(SLOTS, dtype=np.int32)
    static.capture(batch(rng, [(0, 1, "causal")], slots))
    captured = static.shapes

    where, tries = static if without == "_compute" else cuda_graphs, []

    def fail(*args: Any) -> None:
        tries.append(args)
        raise torch.cuda.OutOfMemoryError

    large = batch(rng, [(0, 4, "causal"), (0, 4, "tree")], slots)
    with monkeypatch.context() as patch:
        patch.setattr(where, without, fail)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            static.capture(large)
    assert static.shapes == captured
    for segments in (large, batch(rng, [(0, 3, "causal"), (0, 2, "tree")], slots), large):
        keep = np.arange(sum(len(segment.slots) for segment in segments), dtype=np.int32)
        with monkeypatch.context() as patch:
            patch.setattr(where, without, fail)
            got = static.forward(segments, keep)
        torch.testing.assert_close(got, plain.forward(segments, keep), atol=1e-4, rtol=1e-4)
    assert static.shapes == captured
    assert len(tries) == 1


@pytest.mark.parametrize("without", ["_compute", "_Static"])
def test_a_batch_for_whose_capture_there_is_no_memory_goes_the_ordinary_way(
    without: str, weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target whose forward fails while it serves would end, and be loaded anew. Other ranks wait."""
    static = GraphedRunner(LlamaRunner(weights, SLOTS + 1), capture_at=1)
    plain = LlamaRunner(weights, SLOTS)
    segments = batch(
        np.random.default_rng(0), [(0, 4, "causal"), (0, 4, "tree")], np.arange(SLOTS, dtype=np.int32)
    )
    keep = np.arange(8, dtype=np.int32)
    group: Any = object()

    def fail(*args: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(static if without == "_compute" else cuda_graphs, without, fail)
        of_ranks = GraphedRunner(LlamaRunner(replace(weights, group=group), SLOTS + 1), capture_at=1)
        patch.setattr(of_ranks, "_compute", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            of_ranks.forward(segments, keep)
        got = static.forward(segments, keep)
        torch.testing.assert_close(got, plain.forward(segments, keep), atol=1e-4, rtol=1e-4)
    static.forward(segments, keep)
    assert static.shapes == []  # nor later


@given(
    one=st.builds(Shape, *[st.integers(1, 64)] * 2, st.just(0), st.sampled_from([0, 8, 64, 96])),
    other=st.builds(Shape, *[st.integers(1, 64)] * 2, st.just(0), st.sampled_from([0, 8, 64, 96])),
)
def test_a_shape_serves_what_it_holds(one: Shape, other: Shape) -> None:
    holds = one.requests >= other.requests and one.rows >= other.rows and one.num_rows >= other.num_rows
    is_near = one.num_rows - other.num_rows <= 32
    assert one.serves(other) == (holds and is_near and one.is_adapted == other.is_adapted)
    assert one.serves(one)
    assert not Shape(4, 4, 512).serves(Shape(4, 4, 256))  # twice the keys, read for nothing


@pytest.mark.parametrize("is_rectangle", [False, True])
def test_what_decoding_meets_is_captured_beforehand(is_rectangle: bool) -> None:
    """Batches of every size up to 64 requests and 512 rows are replayed from the start."""
    batches = usual_batches(is_rectangle=is_rectangle)
    assert [sum(counts) for counts in batches] == sorted(map(sum, batches), reverse=True)
    assert all(1 <= min(counts) <= max(counts) <= (16 if is_rectangle else 256) for counts in batches)
    slots = np.arange(512, dtype=np.int32)

    def shape(counts: list[int]) -> Shape:
        segments, used = [], 0
        for rows in counts:
            own = slots[used : used + rows]
            segments.append(Segment(own, own, own, own[:0]))
            used += rows
        return shape_of(segments, with_keys=False, is_rectangle=is_rectangle)

    captured = {shape(counts) for counts in batches}
    assert len(captured) <= MOST_SHAPES // 2  # room for what else comes often
    met = set()
    for requests in (*range(1, 19), *range(22, 65, 6), 63, 64):
        for most in range(1, 17):
            for rows in range(requests + most - 1, min(requests * most, 512) + 1, 1 + requests // 8):
                rest, others = rows - most, requests - 1
                counts = [most, *(rest // others + (i < rest % others) for i in range(others))]
                met.add(shape(counts))
        # Prompts of any length beside others that decode, or a second prompt.
        for most in () if is_rectangle else range(17, MOST_PROMPT_ROWS - requests + 2, 3):
            met.add(shape([most, *[1] * (requests - 1)]))
            left = MOST_PROMPT_ROWS - most - requests + 1
            if requests > 1 and left > 0:
                met.add(shape([most, min(most, 1 + left), *[1] * (requests - 2)]))
    met = {one for one in met if one.num_rows <= 512}
    assert [one for one in met if not any(two.serves(one) for two in captured)] == []
    assert len(met) >= len(captured)


def test_what_decodes_is_not_padded_to_the_shape_of_a_prompt() -> None:
    """It may have as many rows in all, but attention takes larger tiles there, and more launches."""
    captured = CapturedShapes[Shape, None](MOST_SHAPES)
    for counts in usual_batches(is_rectangle=False):
        shape = shape_of(new_requests(counts), with_keys=False, is_rectangle=False)
        captured.is_due(shape, at_once=True)
        captured.keep(shape, None)
    for requests in range(1, 65):
        for most in (1, 2, 5, 16):
            counts = [most, *[1] * (requests - 1)]
            shape = shape_of(new_requests(counts), with_keys=False, is_rectangle=False)
            near = shape if shape in captured else captured._near(shape)
            assert near is not None
            assert near.rows <= (1 if most == 1 else 16)


@given(st.integers(1, 200_000))
def test_rounding_holds_and_wastes_little(number: int) -> None:
    assert number <= rounded_keys(number) <= max(number + 255, number * 1.125 + 1)
    small = number % 512 + 1
    assert small <= rounded(small) < max(2 * small, small + 32)
    assert rounded(rounded(small)) == rounded(small)
    assert rounded_keys(rounded_keys(number)) == rounded_keys(number)


def test_rows_of_padding_write_to_the_scratch_slot() -> None:
    rng = np.random.default_rng(0)
    segments = batch(rng, [(3, 2, "causal"), (4, 3, "tree")], np.arange(20, dtype=np.int32))
    padded = pad_rows(segments, Shape(4, 4, 256), 99)
    written = padded.write.reshape(4, 4)
    assert written.tolist() == [[3, 4, 99, 99], [9, 10, 11, 99], [99] * 4, [99] * 4]
    assert padded.batch_rows.tolist() == [0, 1, 4, 5, 6]
    assert padded.tokens[padded.batch_rows].tolist() == [t for s in segments for t in s.tokens]
    assert padded.positions[padded.batch_rows].tolist() == [p for s in segments for p in s.positions]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(0, 100),
)
def test_a_token_budget_holds_what_requests_have(shapes: list[tuple[int, int]], seed: int) -> None:
    """Rows in a row, padding behind them all; far fewer than a rectangle has if one request has many."""
    rng = np.random.default_rng(seed)
    segments = batch(rng, [(past, rows, "causal") for past, rows in shapes], np.arange(SLOTS))
    shape = shape_of(segments, with_keys=False, is_rectangle=False)
    total = sum(rows for _, rows in shapes)
    assert total <= shape.num_rows == shape.tokens == rounded(total)
    assert len(segments) <= shape.requests < 2 * len(segments)
    assert max(rows for _, rows in shapes) <= shape.rows
    padded = pad_rows(segments, shape, 999)
    assert padded.batch_rows.tolist() == list(range(total))
    assert padded.tokens[:total].tolist() == [t for s in segments for t in s.tokens]
    assert padded.positions[:total].tolist() == [p for s in segments for p in s.positions]
    assert padded.write.tolist() == [slot for s in segments for slot in s.slots] + [999] * (
        shape.tokens - total
    )
