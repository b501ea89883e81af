"""Layers of beams whose description moves on by itself, against layers described one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.moving_rows import MOST_COLUMNS, MOST_LAYERS, BeamRows, BeamShape, MovingRows
from engine.runner import Segment
from engine.segment_table import FIELDS, described
from engine.triton_attention import TritonAttention
from tests.examples import examples

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu moves rows on the GPU, by the same kernel"
)

SLOTS, SPARE, LONGEST = 3000, 2999, 120

beams = st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(1, 4), st.integers(1, 3))
"""Keys committed, keys above, layers, width."""


def rows_of(shape: BeamShape) -> MovingRows:
    attention = TritonAttention(SLOTS, dtype=torch.float32, device="cpu")
    return MovingRows(attention, shape, max_tokens=LONGEST, spare=SPARE)


def laid_out(sizes: list[tuple[int, int, int, int]], rng: np.random.Generator) -> list[BeamRows]:
    free = rng.permutation(SPARE).astype(np.int32)
    found = []
    for past, above, layers, width in sizes:
        counts = np.cumsum([past, above, layers * width])
        one, two, three, free = np.split(free, counts)
        found.append(
            BeamRows(one, two, three, width, position=int(rng.choice([past, LONGEST - 2, LONGEST + 9])))
        )
    return found


def by_hand(beam: BeamRows, number: int) -> Segment:
    """What a layer of a beam is given; a row's tokens do not matter."""
    before, end = number * beam.width, (number + 1) * beam.width
    nothing = np.zeros(beam.width, dtype=np.int32)
    return Segment(
        nothing,
        np.full(beam.width, min(beam.position + number, LONGEST - 1), dtype=np.int32),
        beam.slots[before:end],
        np.concatenate((beam.past, beam.above, beam.slots[:before])),
    )


@examples(25)
@given(
    first=st.lists(beams, min_size=1, max_size=4),
    second=st.lists(beams, min_size=1, max_size=4),
    width=st.sampled_from([3, 4]),
    seed=st.integers(0, 1000),
)
def test_each_layer_is_as_described_alone(first: Any, second: Any, width: int, seed: int) -> None:
    """Of the second of two drafts, which has nothing of the first."""
    rng = np.random.default_rng(seed)
    rows = rows_of(BeamShape(4, width))
    for sizes in (first, second):
        found = laid_out(sizes, rng)
        assert rows.holds(found)
        rows.begin(found)
        layers = max(beam.num_layers for beam in found)
        for number in range(layers):
            rows.move_on()
            check(rows, found, number)
        assert rows.layer.tolist() == [layers] * 4


def check(rows: MovingRows, found: list[BeamRows], number: int) -> None:
    """The tables of layer `number`."""
    table = rows.plan.table.segments.view(-1, FIELDS).tolist()
    positions, write = (t.view(*rows.shape).tolist() for t in (rows.positions, rows.plan.write))
    for index, beam in enumerate(found):
        if number >= beam.num_layers:  # of nobody: what it writes nobody sees
            assert write[index] == [SPARE] * rows.shape.width
            continue
        segment = by_hand(beam, number)
        description = described([segment])
        row, num_rows, key, keys, committed, seen, columns = table[index]
        # More rows than the beam has: what they see is committed.
        assert (num_rows, keys) == (rows.shape.width, description.table[3])
        assert (row, seen) == (index * rows.shape.width, index * rows.shape.width * MOST_COLUMNS)
        assert (committed, columns) == (len(beam.past), MOST_COLUMNS)
        slots = rows.plan.table.slots[key : key + keys].tolist()
        assert slots == np.concatenate(description.slots).tolist()
        assert positions[index][: beam.width] == segment.positions.tolist()
        assert write[index] == segment.slots.tolist() + [SPARE] * (rows.shape.width - beam.width)
    nobody = [rows.shape.width, 0, 0, -1]  # rows, keys, of which committed, a chain: they see nothing
    assert [[line[1], *line[3:6]] for line in table[len(found) :]] == [nobody] * (4 - len(found))


@examples(15)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(1, 4), st.just(1)), max_size=4
    ),
    seed=st.integers(0, 1000),
)
def test_chains_are_causal(sizes: Any, seed: int) -> None:
    """Without masks: all rows see all keys before their own."""
    found = laid_out([(4, 0, 2, 1), *sizes][:4], np.random.default_rng(seed))
    rows = rows_of(BeamShape(4, 1))
    rows.begin(found)
    for number in range(max(beam.num_layers for beam in found)):
        rows.move_on()
        for line, beam in zip(rows.plan.table.segments.view(-1, FIELDS).tolist(), found, strict=False):
            if number < beam.num_layers:
                row, num_rows, _, keys, committed, seen, _ = line
                assert [row, num_rows, 0, keys, committed, seen, 0] == [
                    row, *described([by_hand(beam, number)]).table[1:].tolist()
                ]  # fmt: skip


def test_what_rows_of_the_first_layer_see_is_the_hosts_to_say() -> None:
    one, two = laid_out([(5, 2, 2, 2), (3, 0, 2, 1)], np.random.default_rng(0))
    seen = np.array([[1, 0, 1, 0], [1, 1, 0, 1]], dtype=np.bool_)
    rows = rows_of(BeamShape(2, 2))
    rows.begin([BeamRows(one.past, one.above, one.slots, 2, 5, seen), two])
    expected = np.zeros((2, 2, MOST_COLUMNS), dtype=np.uint8)
    expected[0, :, :4] = seen
    assert np.array_equal(rows.seen.numpy(), expected)
    assert rows.own_column.tolist() == [2, 0]
    rows.begin([two])
    assert not rows.seen.any()


@pytest.mark.parametrize(
    ("sizes", "width", "holds"),
    [
        ([(5, 0, MOST_LAYERS, 1)], 1, True),
        ([(5, 0, MOST_LAYERS + 1, 1)], 1, False),
        ([(5, 0, 2, 1)] * 3, 1, False),  # requests
        ([(5, 0, 2, 2)], 1, False),
        ([(5, 0, MOST_LAYERS, 4)], 4, True),
        ([(5, 1, MOST_LAYERS, 4)], 4, False),  # columns
        # Of the shorter beam as many as it would have with all layers.
        ([(5, 1, MOST_LAYERS - 1, 4), (5, 5, 1, 4)], 4, False),
        ([(1200, 0, 2, 1), (60, 0, 2, 1)], 1, True),
        ([(1200, 0, 2, 1), (62, 0, 2, 1)], 1, False),  # keys: 2 of 120 tokens, and of 512 in trees
    ],
)
def test_what_finds_room(sizes: Any, width: int, holds: bool) -> None:
    found = laid_out(sizes, np.random.default_rng(0))
    assert rows_of(BeamShape(2, width)).holds(found) == holds
