"""Cost model and calibration: they find what generated the data."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.calibration import DrafterCalibration
from cluster.cost_model import VERIFY_PLAIN, CostModel, CostProfile, LinearCost, StepPoint
from cluster.profile_fit import fit_cost


def test_the_fit_recovers_a_linear_machine() -> None:
    true = LinearCost(alpha=2e-6, gamma=4e-4, rho=2e-4, delta=7e-3)
    rng = np.random.default_rng(0)
    points = [
        StepPoint(r, r * q, r * c, true.seconds(r, r * q, r * c) * rng.normal(1.0, 0.01))
        for r in (1, 4, 16)
        for q in (1, 2, 4, 8)
        for c in (50, 300)
    ]
    fitted = fit_cost(points)
    errors = [abs(fitted.seconds(*p_) / p.seconds - 1) for p in points for p_ in [_shape(p)]]
    assert np.median(errors) < 0.02


def _shape(point: StepPoint) -> tuple[int, int, int]:
    return point.num_requests, point.num_tokens, point.num_context


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="coefficients"):
        fit_cost([StepPoint(1, 1, 1, 0.1)])


def test_online_correction_follows_a_machine_that_became_slower() -> None:
    model = CostModel(CostProfile(target=LinearCost(gamma=1e-3, delta=1e-2)))
    for _ in range(200):
        model.observe(VERIFY_PLAIN, model.verify_seconds(1, 1, 0), 0.022)
    assert model.verify_seconds(1, 1, 0) == pytest.approx(0.022, rel=0.05)


def test_one_hiccup_hardly_moves_the_correction() -> None:
    model = CostModel(CostProfile(target=LinearCost(gamma=1e-3, delta=1e-2)))
    for _ in range(50):
        model.observe(VERIFY_PLAIN, model.verify_seconds(1, 1, 0), 0.011)
    model.observe(VERIFY_PLAIN, model.verify_seconds(1, 1, 0), 10.0)
    assert model.correction(VERIFY_PLAIN) < 1.1


def test_the_knee_is_where_time_leaves_its_floor() -> None:
    cost = LinearCost(gamma=1e-3, delta=9e-3)
    knee = cost.knee(1, slack=1.5)
    assert cost.seconds(1, knee, 0) <= 1.5 * cost.seconds(1, 1, 0) + 1e-9
    assert cost.seconds(1, knee + 1, 0) > 1.5 * cost.seconds(1, 1, 0)


def test_calibration_learns_an_overconfident_drafter_and_stays_monotone() -> None:
    rng = np.random.default_rng(1)
    calibration = DrafterCalibration()
    probability = rng.random(20_000)
    calibration.observe(probability, rng.random(20_000) < probability**2)
    grid = np.linspace(0.01, 0.99, 50)
    learnt = calibration.apply(grid)
    assert (np.diff(learnt) >= 0).all()
    assert np.abs(learnt - grid**2).max() < 0.08


def test_without_observations_a_probability_is_what_it_says() -> None:
    grid = np.linspace(0.01, 0.99, 50)
    assert np.abs(DrafterCalibration().apply(grid) - grid).max() <= 0.025 + 1e-9
