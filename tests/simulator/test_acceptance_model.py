"""Draft probabilities are acceptance probabilities, and texts depend on nothing that is drafted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.acceptance import (
    AcceptanceModel,
    DraftQuality,
    choices,
    load_fitted,
    request_rate,
    text,
)
from tests.examples import examples

QUALITY = DraftQuality(rate={"code": 0.8, "*": 0.6})
models = st.builds(
    AcceptanceModel,
    request_spread=st.floats(0.0, 1.0),
    own_spread=st.floats(0.0, 0.5),
    concentration=st.floats(0.3, 20.0),
    second_share=st.floats(0.05, 0.6),
    persistence=st.floats(0.0, 0.9),
    shared_confidence=st.floats(0.0, 1.0),
    shared_outcome=st.floats(0.0, 1.0),
)


def chi_square_bound(num_bins: int) -> float:
    """A value that a chi-square of so many degrees of freedom exceeds once in some ten thousand times."""
    return num_bins + 4.0 * np.sqrt(2.0 * num_bins) + 5.0


@pytest.mark.parametrize("name", ["chat", "code"])
def test_each_choice_is_right_as_often_as_its_probability_says(name: str) -> None:
    model = load_fitted()[name]
    said = [
        choices(model, QUALITY, "code", seed, 0, num_positions=400, num_astray=0, width=4)
        for seed in range(150)
    ]
    probability = np.concatenate([one.probability for one in said])
    rank = np.concatenate([one.rank for one in said])
    for column in range(4):
        bins = np.minimum((probability[:, column] * 10).astype(int), 9)
        right = (rank == column).astype(float)
        used, statistic = 0, 0.0
        for index in range(10):
            mine = bins == index
            expected = probability[mine, column]
            variance = float((expected * (1.0 - expected)).sum())
            if variance < 20.0:
                continue
            used += 1
            statistic += (float(right[mine].sum()) - float(expected.sum())) ** 2 / variance
        assert used
        assert statistic < chi_square_bound(used), (column, statistic, used)


@examples(30)
@given(model=models, seed=st.integers(0, 1 << 60), width=st.integers(1, 4))
def test_probabilities_fall_along_choices_and_leave_some_for_the_rest(
    model: AcceptanceModel, seed: int, width: int
) -> None:
    said = choices(model, QUALITY, "chat", seed, 0, num_positions=64, num_astray=16, width=width)
    assert (np.diff(said.probability, axis=1) <= 1e-12).all()
    assert (said.probability.sum(axis=1) <= 1.0 + 1e-12).all()
    assert (said.logp <= 0.0).all()
    assert (said.rank[64:] == width).all()  # off the text nothing is right


@examples(20)
@given(model=models, seed=st.integers(0, 1 << 60))
def test_what_is_said_does_not_depend_on_how_much_is_asked(model: AcceptanceModel, seed: int) -> None:
    narrow = choices(model, QUALITY, "chat", seed, 1, num_positions=40, num_astray=8, width=1)
    wide = choices(model, QUALITY, "chat", seed, 1, num_positions=40, num_astray=8, width=4)
    np.testing.assert_array_equal(narrow.logp[:, 0], wide.logp[:, 0])
    np.testing.assert_array_equal(narrow.rank == 0, wide.rank == 0)


def test_a_chain_is_accepted_as_often_as_the_product_of_its_probabilities() -> None:
    model, lengths, expected, variance = AcceptanceModel(), 0.0, 0.0, 0.0
    for seed in range(200):
        said = choices(model, QUALITY, "chat", seed, 0, num_positions=4 * 50, num_astray=0, width=1)
        right = (said.rank == 0).reshape(50, 4).cumprod(axis=1)[:, -1]
        path = said.probability[:, 0].reshape(50, 4).prod(axis=1)
        lengths += right.sum()
        expected += path.sum()
        variance += (path * (1 - path)).sum()
    assert abs(lengths - expected) < 4.0 * np.sqrt(variance)


def test_fixed_rates_are_the_same_everywhere() -> None:
    quality = DraftQuality(rate={"*": 0.7}, fixed=True)
    said = choices(AcceptanceModel(), quality, "x", 3, 0, num_positions=4000, num_astray=0, width=1)
    assert np.allclose(said.probability, 0.7)
    assert abs(float((said.rank == 0).mean()) - 0.7) < 0.03


def test_a_sharp_drafter_claims_more_than_is_true_and_ranks_the_same() -> None:
    sharp = DraftQuality(rate={"*": 0.6}, sharpness=2.0)
    plain = choices(AcceptanceModel(), QUALITY, "chat", 5, 0, num_positions=500, num_astray=0, width=3)
    said = choices(AcceptanceModel(), sharp, "chat", 5, 0, num_positions=500, num_astray=0, width=3)
    np.testing.assert_array_equal(said.rank, plain.rank)
    sure = plain.probability[:, 0] > 0.7
    assert (np.exp(said.logp[sure, 0]) >= plain.probability[sure, 0]).all()


def test_harder_classes_and_requests_differ() -> None:
    model = AcceptanceModel()
    rates = np.array([request_rate(model, QUALITY, "code", seed, 0) for seed in range(300)])
    assert abs(float(np.median(rates)) - 0.8) < 0.03
    assert 0.03 < float(rates.std()) < 0.12
    with pytest.raises(ValueError, match="no acceptance rate for class 'chat'"):
        DraftQuality(rate={"code": 0.5}).rate_of("chat")


def test_texts_are_prefixes_of_each_other() -> None:
    np.testing.assert_array_equal(text(9, 10, 1000), text(9, 40, 1000)[:10])
    assert (text(9, 40, 1000) % 2 == 0).all()
