"""What selectors are told of costs, against the cost model and against trying every depth."""

from __future__ import annotations

import pytest

from cluster.cost_model import VERIFY_DRAFTED, CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.pool_views import LAYERS, MeasuredCosts
from selector.goodput import best_goodput

# A GPU: rows are nearly free up to the knee.
TARGET = LinearCost(alpha=1e-7, beta=1e-8, gamma=2e-5, delta=1e-2, gamma_knee=2e-3, knee_tokens=64)
DRAFTERS = {"small": LinearCost(delta=3e-4), "large": LinearCost(delta=9e-4)}


@pytest.mark.parametrize("knee", [0.0, 1.0, 3.0, 64.0])
@pytest.mark.parametrize("slowed", [1.0, 1.4])
def test_a_verified_token_costs_a_request_what_the_forward_says(knee: float, slowed: float) -> None:
    target = LinearCost(alpha=1e-7, beta=1e-8, gamma=2e-5, delta=1e-2, gamma_knee=2e-3, knee_tokens=knee)
    cost = CostModel.corrected(CostProfile(target=target), {VERIFY_DRAFTED: slowed}, {})
    drafted_s, alone_s = (cost.verify_seconds(1, rows, 300, drafted=True) for rows in (1 + LAYERS, 1))
    assert MeasuredCosts(cost).token_s(300) * LAYERS == pytest.approx(drafted_s - alone_s)


def test_below_the_knee_the_quicker_of_two_drafters_is_told() -> None:
    """Priced past the knee, every draft token counts for so much that only being right seems to matter."""
    cost = CostModel(CostProfile(target=TARGET, drafters=DRAFTERS))
    costs = MeasuredCosts(cost)
    rates = {"small": 0.75, "large": 0.80}

    def true_goodput(kind: str) -> float:
        def of(depth: int) -> float:
            tokens = sum(rates[kind] ** layer for layer in range(depth + 1))
            step_s = cost.verify_seconds(1, 1 + depth, 300) + cost.draft_seconds(kind, 1, 1, depth)
            return tokens / step_s

        return max(map(of, range(1, 9)))

    told = {
        kind: best_goodput(rates[kind], costs.layer_s(kind, 0), costs.verify_s(300), costs.token_s(300), 8)
        for kind in rates
    }
    assert max(told, key=told.__getitem__) == max(rates, key=true_goodput) == "small"
    for kind in rates:
        assert told[kind] == pytest.approx(true_goodput(kind), rel=0.02)


def test_a_first_reading_that_stalled_is_not_believed() -> None:
    """Nobody is given to a drafter that seems to read for minutes, and so nothing shows that it does not."""
    cost = CostModel(CostProfile(target=TARGET, drafters=DRAFTERS))
    costs = MeasuredCosts(cost, keeping={"small", "other"})
    before_s = costs.rebuild_s("small", 100)
    costs.have_read("small", 100, 30.0)
    assert costs.rebuild_s("small", 100) < 5.0 * before_s
    for _ in range(10):
        costs.have_read("small", 100, before_s)
    costs.have_read("small", 100, 30.0)
    assert costs.rebuild_s("small", 100) < 3.0 * before_s
    for _ in range(60):  # who lastingly reads slowly is believed to
        costs.have_read("small", 100, 1.0)
    assert costs.rebuild_s("small", 100) == pytest.approx(1.0, rel=0.05)
    costs.have_read("other", 100, 1.0)  # of which the profile says nothing
    assert costs.rebuild_s("other", 200) == pytest.approx(2.0)
