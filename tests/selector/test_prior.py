"""The regression behind a drafter's prior, against ridge regression and against the model it is exact for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selector.prior import DriftingRidge
from tests.examples import examples

SIZE = 5


def problem(seed: int, count: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng, rng.normal(size=(count, SIZE)), rng.normal(size=count), rng.uniform(0.1, 50.0, size=count)


@examples(40)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 40))
def test_without_forgetting_it_is_ridge_regression(seed: int, count: int) -> None:
    rng, features, values, precision = problem(seed, count)
    mean, variance = rng.normal(size=SIZE), rng.uniform(0.01, 4.0, size=SIZE)
    ridge = DriftingRidge(mean, variance, float("inf"))
    for x, y, weight in zip(features, values, precision, strict=True):
        ridge.observe(x, y, weight, now=0)
    # Each prior weight is one more row of least squares.
    rows = np.vstack([features * np.sqrt(precision)[:, None], np.diag(variance**-0.5)])
    right = np.concatenate([values * np.sqrt(precision), mean * variance**-0.5])
    weights = np.linalg.lstsq(rows, right, rcond=None)[0]
    covariance = np.linalg.inv(rows.T @ rows)
    x = rng.normal(size=SIZE)
    found = ridge.predict(x, now=100)
    assert found == pytest.approx((x @ weights, x @ covariance @ x), rel=1e-6, abs=1e-9)


@examples(40)
@given(
    seed=st.integers(0, 2**32),
    gaps=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    memory=st.floats(1.5, 500.0),
)
def test_with_forgetting_it_is_exact_for_weights_that_drift(
    seed: int, gaps: list[int], memory: float
) -> None:
    """Oracle: condition the joint Gaussian of all observations and the answer, written out in full."""
    rng, features, values, precision = problem(seed, len(gaps))
    mean, variance = rng.normal(size=SIZE), rng.uniform(0.01, 4.0, size=SIZE)
    times = np.cumsum(gaps)
    ridge = DriftingRidge(mean, variance, memory)
    for x, y, weight, now in zip(features, values, precision, times, strict=True):
        ridge.observe(x, y, weight, int(now))
    x, now = rng.normal(size=SIZE), int(times[-1]) + 7
    points, when = np.vstack([features, x]), np.append(times, now)
    kept = (1.0 - 1.0 / memory) ** (np.abs(when[:, None] - when[None, :]) / 2)
    joint = kept * (points * variance @ points.T)
    known = joint[:-1, :-1] + np.diag(1.0 / precision)
    gain = np.linalg.solve(known, joint[:-1, -1])
    expected_mean = x @ mean + gain @ (values - features @ mean)
    expected_variance = joint[-1, -1] - gain @ joint[:-1, -1]
    found = ridge.predict(x, now)
    assert found == pytest.approx((expected_mean, expected_variance), rel=1e-5, abs=1e-8)


def test_what_is_not_seen_again_returns_to_the_prior() -> None:
    ridge = DriftingRidge(np.full(SIZE, 0.5), np.full(SIZE, 0.04), 100.0)
    x = np.eye(SIZE)[0]
    for _ in range(50):
        ridge.observe(x, 0.9, 100.0, now=0)
    assert ridge.predict(x, now=0) == pytest.approx((0.9, 0.0), abs=0.01)
    assert ridge.predict(x, now=5000) == pytest.approx((0.5, 0.04), abs=1e-6)


def test_ten_thousand_observations_leave_a_covariance() -> None:
    rng = np.random.default_rng(0)
    ridge = DriftingRidge(np.zeros(SIZE), np.full(SIZE, 0.04), 300.0)
    weights = rng.normal(size=SIZE) * 0.2
    for now in range(10_000):
        x = rng.normal(size=SIZE)
        ridge.observe(x, x @ weights + rng.normal() * 0.1, 100.0, now)
    errors = []
    for x in rng.normal(size=(200, SIZE)):
        mean, variance = ridge.predict(x, now=10_000)
        assert 0.0 < variance < 0.04 * (x @ x)
        errors.append((mean - x @ weights) ** 2)
    assert np.mean(errors) < 0.01


def test_a_memory_below_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match="memory"):
        DriftingRidge(np.zeros(1), np.ones(1), 1.0)
