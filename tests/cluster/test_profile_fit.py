"""The fit finds the machine that made the data, its knee included, and says honestly how well."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.linear_cost import LinearCost, StepPoint
from cluster.profile_fit import fit_cost, fit_held_out, quality_of
from tests.examples import examples

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
GRID = [(r, t, r * c) for r in (1, 4, 16) for t in TOKENS if t >= r for c in (32, 160, 480)]


def measure(machine: LinearCost, noise: float = 0.0) -> list[StepPoint]:
    factor = np.exp(np.random.default_rng(0).normal(0.0, noise, len(GRID)))
    return [StepPoint(*shape, machine.seconds(*shape) * k) for shape, k in zip(GRID, factor, strict=True)]


@st.composite
def machines(draw: st.DrawFn) -> LinearCost:
    return LinearCost(
        alpha=draw(st.floats(0, 1e-5)),
        beta=draw(st.floats(0, 1e-6)),
        gamma=draw(st.floats(1e-5, 1e-3)),
        rho=draw(st.floats(0, 1e-3)),
        delta=draw(st.floats(1e-4, 1e-2)),
    )


@examples(60)
@given(machines())
def test_coefficients_of_a_machine_without_a_knee_are_recovered(machine: LinearCost) -> None:
    fitted = fit_cost(measure(machine))
    assert fitted.gamma_knee == 0.0
    for name in LinearCost.__struct_fields__:
        # What a coefficient may be off is seen at the largest forward, in shares of its time.
        assert getattr(fitted, name) == pytest.approx(getattr(machine, name), rel=1e-5, abs=1e-11), name


@examples(60)
@given(machines(), st.floats(3.0, 60.0), st.floats(2.0, 50.0))
def test_a_knee_is_recovered(machine: LinearCost, knee: float, steepness: float) -> None:
    bent = LinearCost(
        alpha=machine.alpha,
        beta=machine.beta,
        gamma=machine.gamma * 0.01,
        rho=machine.rho,
        delta=machine.delta,
        gamma_knee=machine.delta / knee * steepness,
        knee_tokens=knee,
    )
    fitted = fit_cost(measure(bent))
    # Two measured token counts on either side of a knee determine it; in between it is exact.
    low, high = next((a, b) for a, b in pairwise(TOKENS) if a <= knee <= b)
    assert low * 0.95 <= fitted.knee_tokens <= high * 1.05
    errors = [abs(fitted.seconds(*shape) / bent.seconds(*shape) - 1.0) for shape in GRID]
    assert np.median(errors) < 0.02
    assert fitted.knee(1) == pytest.approx(bent.knee(1), rel=0.1, abs=1)


@examples(40)
@given(machines(), st.sampled_from([1 / 32, 0.125, 0.25]), st.floats(0.5, 20.0))
def test_what_experts_take_is_recovered(machine: LinearCost, share: float, times: float) -> None:
    mixture = msgspec.structs.replace(machine, experts_s=times * machine.delta, expert_share=share)
    fitted = fit_cost(measure(mixture), share)
    assert (fitted.gamma_knee, fitted.expert_share) == (0.0, share)
    for shape in GRID:
        assert fitted.seconds(*shape) == pytest.approx(mixture.seconds(*shape), rel=1e-5)
    assert fitted.experts_s == pytest.approx(mixture.experts_s, rel=1e-3)


def test_without_being_told_of_experts_few_tokens_seem_dear_and_further_ones_cheap() -> None:
    """Measured: the demo target with 16 experts in place of each feed-forward layer, 2 per token."""
    mixture = LinearCost(alpha=4e-6, beta=4e-7, gamma=1.2e-3, rho=4e-4, delta=1.3e-2, experts_s=0.127)
    points = measure(msgspec.structs.replace(mixture, expert_share=0.125), noise=0.03)
    blind, told = fit_held_out(points), fit_held_out(points, expert_share=0.125)
    assert told.quality.median < 0.05 < 0.15 < blind.quality.median
    one, five = told.cost.seconds(1, 1, 0), told.cost.seconds(1, 5, 0)
    assert five / one > 2.3
    assert blind.cost.seconds(1, 5, 0) / blind.cost.seconds(1, 1, 0) < 1.4


@examples(40)
@given(machines(), st.floats(0.005, 0.08))
def test_held_out_errors_are_those_of_the_noise(machine: LinearCost, noise: float) -> None:
    fit = fit_held_out(measure(machine, noise))
    # The median of |N(0, s)| is 0.67 s.
    assert 0.2 * noise < fit.quality.median < 1.6 * noise
    assert fit.quality.num_held_out == sum(fit.held_out) == len(GRID) // 4
    assert fit.quality.num_fitted + fit.quality.num_held_out == len(GRID)
    assert fit.quality.median <= fit.quality.p90 <= fit.quality.worst


def test_noise_alone_makes_no_knee() -> None:
    machine = LinearCost(alpha=1e-6, gamma=1e-4, rho=1e-5, delta=3e-3)
    assert fit_cost(measure(machine, noise=0.05)).gamma_knee == 0.0


def test_held_out_points_are_not_fitted() -> None:
    points = measure(LinearCost(gamma=1e-4, delta=1e-3))
    held_out = fit_held_out(points).held_out
    wrong = [
        StepPoint(p.num_requests, p.num_tokens, p.num_context, 2 * p.seconds) if out else p
        for p, out in zip(points, held_out, strict=True)
    ]
    fit = fit_held_out(wrong)
    assert fit.quality.median == pytest.approx(0.5)
    assert quality_of(fit.cost, points, np.array(held_out)).worst < 1e-6


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([StepPoint(1, 1, 1, 0.1)] * 4, "coefficients"),
        ([StepPoint(1, 1, 1, 0.0)] * 9, "no time at all"),
    ],
)
def test_what_cannot_be_fitted_is_refused(points: list[StepPoint], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_cost(points)


def test_too_few_points_to_hold_some_out_are_refused() -> None:
    with pytest.raises(ValueError, match="hold some out"):
        fit_held_out([StepPoint(1, 1, 1, 0.1)] * 3)


@examples(100)
@given(machines(), st.floats(0.0, 40.0), st.floats(0.0, 1e-3), st.integers(0, 60), st.integers(0, 60))
def test_added_seconds_are_differences_of_predictions(
    machine: LinearCost, knee: float, past: float, num_tokens: int, most: int
) -> None:
    bent = LinearCost(gamma=machine.gamma, delta=machine.delta, gamma_knee=past, knee_tokens=knee)
    added = bent.added_seconds(num_tokens, most)
    seconds = [bent.seconds(1, num_tokens + i, 0) for i in range(most + 1)]
    assert added == pytest.approx(np.diff(seconds), abs=1e-12)
    assert (np.diff(added) >= -1e-15).all()
    if num_tokens >= knee and most:
        assert added[0] == pytest.approx(bent.token_seconds(), abs=1e-12)


@examples(100)
@given(machines(), st.floats(0.0, 40.0), st.floats(1e-6, 1e-3), st.integers(1, 32))
def test_the_budget_is_the_last_token_within_the_slack(
    machine: LinearCost, knee: float, past: float, num_requests: int
) -> None:
    cost = LinearCost(
        gamma=machine.gamma * 0.1, rho=machine.rho, delta=machine.delta, gamma_knee=past, knee_tokens=knee
    )
    budget = cost.knee(num_requests, slack=1.5)
    most = 1.5 * cost.seconds(num_requests, num_requests, 0)
    assert budget >= num_requests
    if budget > num_requests:
        assert cost.seconds(num_requests, budget, 0) <= most * (1 + 1e-6)
    assert cost.seconds(num_requests, budget + 1, 0) > most * (1 - 1e-6)
