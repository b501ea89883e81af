"""The time of a forward token by token, and what a mixture's experts add to it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.linear_cost import LinearCost, experts_read
from tests.examples import examples


@st.composite
def costs(draw: st.DrawFn) -> LinearCost:
    return LinearCost(
        alpha=1e-7,
        beta=draw(st.sampled_from([0.0, 1e-7])),
        gamma=draw(st.sampled_from([0.0, 2e-5, 1e-3])),
        rho=1e-5,
        delta=draw(st.floats(1e-3, 2e-2)),
        gamma_knee=draw(st.sampled_from([0.0, 2e-4])),
        knee_tokens=draw(st.sampled_from([0.0, 7.0, 40.5])),
        experts_s=draw(st.sampled_from([0.0, 5e-2])),
        expert_share=draw(st.sampled_from([1 / 64, 0.125, 0.5, 1.0])),
    )


@examples(100)
@given(costs(), st.integers(1, 60), st.integers(0, 30), st.sampled_from([0, 300]))
def test_what_each_token_adds_sums_up_to_the_larger_forward(
    cost: LinearCost, num_tokens: int, most: int, context: int
) -> None:
    added = cost.added_seconds(num_tokens, most, context)
    expected = [
        cost.seconds(1, num_tokens + more, context) - cost.seconds(1, num_tokens, context)
        for more in range(1, most + 1)
    ]
    assert added.cumsum() == pytest.approx(np.array(expected), rel=1e-9, abs=1e-12)


@examples(100)
@given(costs(), st.integers(1, 16), st.sampled_from([1.2, 1.5, 2.0]))
def test_the_budget_is_the_most_that_takes_no_longer(cost: LinearCost, n: int, slack: float) -> None:
    all_read = msgspec.structs.replace(cost, delta=cost.delta + cost.experts_s, experts_s=0.0)
    most_s, budget = slack * all_read.seconds(n, n, 0), cost.knee(n, slack)
    assert budget == n or all_read.seconds(n, budget, 0) <= most_s * (1 + 1e-6)
    assert budget == 1 << 16 or all_read.seconds(n, budget + 1, 0) > most_s * (1 - 1e-6)


@examples(50)
@given(costs(), st.floats(0.1, 5.0), st.integers(1, 200))
def test_a_scaled_forward_takes_as_many_times_as_long(
    cost: LinearCost, factor: float, num_tokens: int
) -> None:
    assert cost.scaled(factor).seconds(1, num_tokens, 70) == pytest.approx(
        factor * cost.seconds(1, num_tokens, 70)
    )


@pytest.mark.parametrize(("num_experts", "per_token"), [(8, 2), (64, 8), (128, 1)])
def test_experts_read_are_as_many_as_random_tokens_are_sent_to(num_experts: int, per_token: int) -> None:
    rng = np.random.default_rng(0)
    for num_tokens in (1, 2, 5, 20):
        counted = [
            len({expert for _ in range(num_tokens) for expert in rng.permutation(num_experts)[:per_token]})
            for _ in range(400)
        ]
        share = experts_read(float(num_tokens), per_token / num_experts)
        assert share * num_experts == pytest.approx(np.mean(counted), rel=0.04)
