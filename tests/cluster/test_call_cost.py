"""Draft calls are learnt as a line: so much per layer, and so much per call."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.call_cost import CallCost
from cluster.cost_model import PER_CALL, CostModel, CostProfile
from cluster.linear_cost import LinearCost


@given(st.floats(0.5, 3.0), st.floats(0.0, 2e-3), st.integers(0, 100))
def test_slope_and_fixed_part_are_found(slope: float, fixed_s: float, seed: int) -> None:
    call, rng = CallCost(), np.random.default_rng(seed)
    for layers_s in rng.uniform(3e-4, 3e-3, 600).tolist():
        call.observe(layers_s, slope * layers_s + fixed_s, 0.05)
    # The ridge draws the slope towards 1 by a part of the distance, about what the recent calls come to:
    # their mean is within 4e-4 of that of all.
    for layers_s in (5e-4, 1.65e-3, 3e-3):
        truly = slope * layers_s + fixed_s
        bound = 0.5 * abs(slope - 1.0) * (abs(layers_s - 1.65e-3) + 4e-4) + 0.02 * truly + 5e-5
        assert abs(call.expected_s(layers_s) - truly) < bound


def test_calls_of_one_size_leave_the_slope_as_it_is() -> None:
    call = CallCost()
    for _ in range(200):
        call.observe(4e-4, 1e-3, 0.05)
    assert call.slope == pytest.approx(1.0)
    assert call.fixed_s == pytest.approx(6e-4, rel=0.01)
    assert call.expected_s(3.2e-3) == pytest.approx(3.8e-3, rel=0.01)  # a factor would say 8 ms


def test_what_is_computed_ahead_makes_layers_cheap_and_never_negative() -> None:
    call = CallCost()
    for layers_s in [4e-4, 1.2e-3, 2.4e-3] * 100:
        call.observe(layers_s, 2e-4, 0.05)
    assert 0.0 <= call.slope < 0.2
    assert call.fixed_s >= 0.0
    assert call.expected_s(2.4e-3) < 5e-4


def test_one_hiccup_is_not_believed() -> None:
    call = CallCost()
    for _ in range(100):
        call.observe(1e-3, 1e-3, 0.05)
    call.observe(1e-3, 10.0, 0.05)
    assert call.expected_s(1e-3) < 1.2e-3


def test_calls_without_layers_say_nothing() -> None:
    call = CallCost()
    call.observe(0.0, 5e-3, 0.05)
    call.observe(1e-3, 0.0, 0.05)
    assert call == CallCost()


def test_a_model_predicts_as_another_with_its_corrections() -> None:
    profile = CostProfile(target=LinearCost(delta=1e-2), drafters={"d": LinearCost(gamma=1e-5, delta=3e-4)})
    cost = CostModel(profile, kinds={"d-1": "d"})
    for depth in (1, 2, 5, 8) * 20:
        cost.observe_draft("d-1", cost.layers_seconds("d-1", 1, 2, depth), 5e-4 + 2e-4 * depth)
    assert cost.correction("d" + PER_CALL) > 0.0
    again = CostModel.corrected(profile, cost.corrections, cost.kinds)
    for depth in range(9):
        assert again.draft_seconds("d-1", 3, 2, depth) == cost.draft_seconds("d-1", 3, 2, depth)
    assert cost.draft_seconds("d-1", 1, 2, 0) == 0.0
