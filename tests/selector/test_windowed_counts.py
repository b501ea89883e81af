"""Counts that forget what was before a change: none is seen where there is none, a small one is found."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selector.windowed_counts import PIECE_SHARE, PIECE_TOKENS, SHIFT_DEVIATIONS, WindowedCounts
from tests.examples import examples

Step = tuple[int, int]


def judged(rng: np.random.Generator, rate: float, num_tokens: int) -> list[Step]:
    """Independent tokens in steps of one to eight."""
    steps = list[Step]()
    while num_tokens > 0:
        scored = min(int(rng.integers(1, 9)), num_tokens)
        steps.append((scored, int(rng.binomial(scored, rate))))
        num_tokens -= scored
    return steps


def first_change(steps: list[Step]) -> int | None:
    """Tokens until a change is seen."""
    counts, num_tokens = WindowedCounts(), 0
    for scored, agreed in steps:
        num_tokens += scored
        if counts.add(scored, agreed):
            return num_tokens
    return None


def deviations(new: Step, old: Step) -> float:
    """How many standard deviations lie between two rates (the textbook's pooled two-sample test)."""
    pooled = (new[1] + old[1] + 1) / (new[0] + old[0] + 2)
    error = (pooled * (1 - pooled) * (1 / new[0] + 1 / old[0])) ** 0.5
    return abs(new[1] / new[0] - old[1] / old[0]) / error


class EveryPiece:
    """The same with all pieces kept as they were: slower with every token, and never coarser."""

    def __init__(self) -> None:
        self.pieces: list[Step] = []
        self.rest = (0, 0)

    def add(self, scored: int, agreed: int) -> bool:
        self.rest = (self.rest[0] + scored, self.rest[1] + agreed)
        if self.rest[0] < PIECE_TOKENS:
            return False
        self.pieces.append(self.rest)
        self.rest = (0, 0)
        found = []
        for cut in range(1, len(self.pieces)):
            new, old = (
                tuple(map(sum, zip(*part, strict=True))) for part in (self.pieces[cut:], self.pieces[:cut])
            )
            found.append((deviations(new, old), cut))
        most, cut = max(found, default=(0.0, 0))
        if most <= SHIFT_DEVIATIONS:
            return False
        del self.pieces[:cut]
        return True


@examples(100)
@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 1)), max_size=60))
def test_nothing_is_lost_and_pieces_stay_few(amounts: list[tuple[int, float]]) -> None:
    counts, held = WindowedCounts(), list[Step]()
    for scored, share in amounts:
        step = (scored, round(scored * share))
        held.append(step)
        if counts.add(*step):
            # What is kept are the newest steps, all of them from some step on.
            totals = [(sum(s for s, _ in held[i:]), sum(a for _, a in held[i:])) for i in range(len(held))]
            assert (counts.scored, counts.agreed) in totals[1:]
            held = held[totals.index((int(counts.scored), int(counts.agreed))) :]
        assert counts.scored == sum(scored for scored, _ in held)
        assert counts.agreed == sum(agreed for _, agreed in held)


def test_pieces_grow_with_the_logarithm_of_the_tokens() -> None:
    rng = np.random.default_rng(0)
    counts, num_tokens = WindowedCounts(), 200_000
    for step in judged(rng, 0.8, num_tokens):
        counts.add(*step)
    # A piece may be smaller only if it and its neighbour are together more than their share.
    assert len(counts._pieces) < 2 * (PIECE_SHARE + 1) * log(num_tokens / PIECE_TOKENS)
    assert counts.scored == num_tokens


@examples(60)
@given(st.integers(0, 2**32), st.floats(0.2, 0.95), st.floats(-0.5, 0.5), st.integers(200, 3000))
def test_a_change_is_seen_when_all_pieces_would_show_it(
    seed: int, rate: float, difference: float, num_before: int
) -> None:
    rng = np.random.default_rng(seed)
    after = min(max(rate + difference, 0.0), 1.0)
    steps = [*judged(rng, rate, num_before), *judged(rng, after, 2000)]
    exact, seen = EveryPiece(), []
    for step in steps:
        seen.append(exact.add(*step))
    expected = next((sum(s for s, _ in steps[: i + 1]) for i, found in enumerate(seen) if found), None)
    found = first_change(steps)
    if expected is None:
        assert found is None  # fewer places to cut at: never more often
    else:
        # Coarser pieces may not begin where the change did.
        assert found is not None or expected > num_before + 1000
        assert found is None or expected <= found <= expected + (expected // PIECE_SHARE) + 4 * PIECE_TOKENS


def test_no_change_is_seen_where_there_is_none() -> None:
    rng = np.random.default_rng(1)
    assert [first_change(judged(rng, rate, 50_000)) for rate in (0.3, 0.6, 0.8, 0.95)] == [None] * 4


@pytest.mark.parametrize(("before", "after"), [(0.88, 0.95), (0.8, 0.85), (0.6, 0.5)])
def test_a_small_change_is_found_though_much_was_before(before: float, after: float) -> None:
    """Of eighty thousand tokens a change by 0.05 has to be found within a few thousand."""
    rng = np.random.default_rng(2)
    steps = [*judged(rng, before, 80_000), *judged(rng, after, 8_000)]
    found = first_change(steps)
    assert found is not None
    assert 80_000 < found < 84_000
