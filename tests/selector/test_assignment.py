"""The matching and its prices, against trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selector.assignment import NONE, Float64, Int64, capacity_prices, match
from tests.examples import examples


def brute_force(weights: Float64, capacities: Int64, none: Float64) -> float:
    num_requests, num_drafters = weights.shape
    best = -np.inf
    for columns in product(range(-1, num_drafters), repeat=num_requests):
        counts = np.bincount([c for c in columns if c >= 0], minlength=num_drafters)
        if np.all(counts <= capacities):
            value = sum(none[i] if c < 0 else weights[i, c] for i, c in enumerate(columns))
            best = max(best, float(value))
    return best


@st.composite
def problems(draw: st.DrawFn) -> tuple[Float64, Int64, Float64]:
    num_requests, num_drafters = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    # Few different weights, so that there are ties.
    weight = st.one_of(st.integers(-3, 6).map(float), st.floats(-3, 6), st.just(-np.inf))
    rows = st.lists(weight, min_size=num_drafters, max_size=num_drafters)
    weights = draw(st.lists(rows, min_size=num_requests, max_size=num_requests))
    capacities = draw(st.lists(st.integers(0, 3), min_size=num_drafters, max_size=num_drafters))
    none = draw(st.lists(st.integers(-1, 3), min_size=num_requests, max_size=num_requests))
    return np.array(weights), np.array(capacities), np.array(none, dtype=np.float64)


@examples(150)
@given(problems())
def test_the_matching_equals_brute_force_and_keeps_capacities(
    problem: tuple[Float64, Int64, Float64],
) -> None:
    weights, capacities, none = problem
    found = match(weights, capacities, none)
    served = found.columns[found.columns != NONE]
    assert np.all(np.bincount(served, minlength=len(capacities)) <= capacities)
    value = sum(none[i] if c == NONE else weights[i, c] for i, c in enumerate(found.columns))
    assert found.value == pytest.approx(value)
    assert found.value == pytest.approx(brute_force(weights, capacities, none))
    assert np.array_equal(match(weights, capacities, none).columns, found.columns)


@examples(80)
@given(problems())
def test_a_price_is_what_one_more_place_brings(problem: tuple[Float64, Int64, Float64]) -> None:
    weights, capacities, none = problem
    prices = capacity_prices(weights, match(weights, capacities, none).columns, none)
    before = brute_force(weights, capacities, none)
    for drafter, price in enumerate(prices):
        more = capacities + (np.arange(len(capacities)) == drafter)
        assert price == pytest.approx(brute_force(weights, more, none) - before, abs=1e-9)


def test_a_price_reaches_through_a_chain_of_moves() -> None:
    # Only request 2 waits, and it can use drafter 2 alone: 1 and 0 must move up for it.
    weights = np.array([[9.0, 8.0, 0.0], [0.0, 9.0, 7.0], [0.0, 0.0, 5.0]])
    columns = match(weights, np.array([0, 1, 1]), 0.0).columns
    assert columns.tolist() == [1, 2, NONE]
    assert capacity_prices(weights, columns).tolist() == [9.0 - 8.0 + 9.0 - 7.0 + 5.0, 9.0 - 7.0 + 5.0, 5.0]


def test_large_matchings_are_priced_right() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random((60, 6))
    capacities = np.array([5, 8, 4, 10, 3, 6])
    found = match(weights, capacities)
    prices = capacity_prices(weights, found.columns)
    for drafter in range(6):
        more = capacities + (np.arange(6) == drafter)
        assert prices[drafter] == pytest.approx(match(weights, more).value - found.value)


def test_without_drafters_or_places_nobody_is_served() -> None:
    assert match(np.zeros((2, 0)), np.zeros(0, dtype=np.int64)).columns.tolist() == [NONE, NONE]
    assert match(np.ones((2, 1)), np.zeros(1, dtype=np.int64)).columns.tolist() == [NONE, NONE]
    assert capacity_prices(np.ones((2, 1)), np.array([NONE, NONE])).tolist() == [1.0]


def test_a_place_more_beside_a_free_one_is_worth_nothing_at_all_also_among_ties() -> None:
    """By rounding it was worth 3e-14 tokens a second, and a kind with instances too many was never idle."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        # Requests that differ by how much any drafter helps them, and some serve where they are now.
        weights = 30.0 + rng.uniform(5, 200, 3) + rng.uniform(0, 300, (6, 1)) - 2.0
        weights[np.arange(6), rng.integers(0, 3, 6)] += 2.0
        capacities = rng.integers(1, 4, 3)
        columns = match(weights, capacities, 30.0).columns
        prices = capacity_prices(weights, columns, 30.0)
        taken = np.bincount(columns[columns != NONE], minlength=3)
        assert np.all(prices[taken < capacities] == 0.0)
