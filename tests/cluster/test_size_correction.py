"""Factors on predicted forwards by their size: each size keeps its own, and none is without one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.call_parts import NO_ROWS, Rows
from cluster.cost_model import VERIFY_PLAIN, CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.size_correction import FIRST_OF, NUM_SIZES, SAYS_OF_OTHERS, SizeCorrection

SIZES = st.floats(0.0, 5000.0)
FORWARDS = st.lists(st.tuples(SIZES, st.floats(0.25, 4.0), st.floats(0.05, 0.25)), max_size=30)


def after(forwards: list[tuple[float, float, float]]) -> SizeCorrection:
    correction = SizeCorrection()
    for num_tokens, ratio, weight in forwards:
        correction.correct(num_tokens, ratio, weight)
    return correction


@given(FORWARDS, SIZES, st.floats(0.25, 4.0), st.floats(0.05, 1.0), st.floats(0.1, 1.0))
def test_a_forward_moves_what_is_believed_of_its_size_by_its_weight(
    before: list[tuple[float, float, float]], num_tokens: float, ratio: float, weight: float, share: float
) -> None:
    correction = after(before)
    known = correction.factor(num_tokens)
    correction.correct(num_tokens, ratio, weight, share)
    moved = math.log(correction.factor(num_tokens) / known) / math.log(ratio) if ratio != 1.0 else None
    if moved is not None and abs(math.log(ratio)) > 1e-3:
        assert share * weight - 1e-9 <= moved <= share * max(weight, 1.0 / FIRST_OF) + 1e-9


@given(FORWARDS, SIZES, st.floats(0.25, 4.0))
def test_all_sizes_move_the_same_way_and_none_beyond_what_was_seen(
    before: list[tuple[float, float, float]], num_tokens: float, ratio: float
) -> None:
    correction = after(before)
    known = np.log(correction.factors)
    correction.correct(num_tokens, ratio, 0.2)
    moved = (np.log(correction.factors) - known) * np.sign(math.log(ratio))
    assert (moved >= -1e-12).all()


@given(FORWARDS, st.floats(1.0, 1024.0))
def test_between_two_sizes_it_is_between_theirs(
    before: list[tuple[float, float, float]], num_tokens: float
) -> None:
    correction = after(before)
    place = min(int(math.log2(num_tokens)), NUM_SIZES - 2)
    least, most = sorted(correction.factors[place : place + 2])
    assert least - 1e-9 <= correction.factor(num_tokens) <= most + 1e-9


def test_beyond_the_sizes_it_is_that_of_the_last() -> None:
    correction = SizeCorrection([1.0 + size for size in range(NUM_SIZES)])
    assert correction.factor(0.0) == correction.factor(1.0) == pytest.approx(1.0)
    assert correction.factor(2.0 ** (NUM_SIZES - 1)) == pytest.approx(NUM_SIZES)
    assert correction.factor(1e6) == pytest.approx(NUM_SIZES)


@pytest.mark.parametrize("factors", [[1.0] * (NUM_SIZES - 1), [1.0] * NUM_SIZES + [1.0], [0.0] * NUM_SIZES])
def test_factors_that_are_none_are_refused(factors: list[float]) -> None:
    with pytest.raises(ValueError, match="factors by size"):
        SizeCorrection(factors)


def truth(num_tokens: int) -> float:
    """What the demo cell's plain steps took on two cores that are threads of one."""
    return float(np.interp(num_tokens, [1, 3, 6, 10, 16, 24], [0.73, 0.82, 0.88, 0.98, 1.14, 1.20]))


def test_what_many_requests_took_says_nothing_of_few_that_were_seen() -> None:
    """Bursts come and go; with one factor, 1.2 would be believed of a lone request after each of them."""
    correction, rng = SizeCorrection(), np.random.default_rng(0)
    for phase in range(8):
        sizes = range(1, 5) if phase % 2 == 0 else range(12, 25)
        for _ in range(400):
            num_tokens = int(rng.choice(sizes))
            took = truth(num_tokens) * float(rng.lognormal(0.0, 0.05))
            correction.correct(num_tokens, took / correction.factor(num_tokens), 0.05)
    for num_tokens in (1, 2, 3, 4, 13, 16, 20, 24):
        assert correction.factor(num_tokens) == pytest.approx(truth(num_tokens), rel=0.05)


def test_sizes_that_were_never_seen_are_believed_to_be_as_far_off() -> None:
    correction = SizeCorrection()
    for _ in range(100):
        correction.correct(16, 1.5 / correction.factor(16), 0.05)
    assert correction.factors == pytest.approx([1.5] * NUM_SIZES, rel=0.02)
    # Once it is seen, a size has its own; what is seen of it then says little of the others.
    for _ in range(100):
        correction.correct(1, 1.0 / correction.factor(1), 0.05)
    assert correction.factor(1) == pytest.approx(1.0, rel=0.02)
    assert correction.factor(16) == pytest.approx(1.5 * (1.0 / 1.5) ** SAYS_OF_OTHERS, rel=0.02)


def test_the_first_forward_of_a_size_counts_for_more_than_one_of_many() -> None:
    correction = SizeCorrection()
    for _ in range(100):
        correction.correct(1, 1.0, 0.05)
    correction.correct(64, 2.0, 0.05)
    assert correction.factor(64) == pytest.approx(2.0 ** (1.0 / FIRST_OF))


def test_the_cost_model_predicts_plain_forwards_by_size_and_so_does_its_copy() -> None:
    target = LinearCost(gamma=2.4e-4, delta=3e-3)
    model, rng = CostModel(CostProfile(target=target)), np.random.default_rng(1)
    for phase in range(6):
        for _ in range(300):
            n = int(rng.integers(1, 4) if phase % 2 == 0 else rng.integers(16, 25))
            parts = model.call_parts(Rows(n, n), NO_ROWS, drafted=False)
            model.observe_call(parts, target.seconds(n, n, 0) * truth(n))
    copy = CostModel.corrected(model.profile, model.corrections, {}, model.plain_by_size)
    for n in (1, 2, 3, 16, 24):
        expected = target.seconds(n, n, 0) * truth(n)
        assert model.verify_seconds(n, n, 0) == pytest.approx(expected, rel=0.05)
        assert copy.verify_seconds(n, n, 0) == pytest.approx(model.verify_seconds(n, n, 0))
        fixed_s = model.verify_fixed_seconds(n)
        assert 0.0 < fixed_s < model.verify_seconds(n, n, 0)
    # By its name alone it is what plain forwards took last, and holds for all: so older records say it.
    older = CostModel.corrected(model.profile, model.corrections, {})
    assert older.verify_seconds(1, 1, 0) == target.seconds(1, 1, 0) * model.correction(VERIFY_PLAIN)
