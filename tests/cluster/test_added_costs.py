"""What is believed of a drafter that nobody has measured."""

from __future__ import annotations

import pytest

from cluster.added_costs import SHARE_OF_TARGET, UNMODELLED, estimated_cost
from cluster.linear_cost import LinearCost

TARGET = LinearCost(alpha=1e-6, gamma=1e-3, delta=1e-2, knee_tokens=64.0)
SMALL, LARGE = LinearCost(gamma=1e-4, delta=1e-3), LinearCost(gamma=5e-4, delta=5e-3)
KNOWN = {"lookup": (0, UNMODELLED), "small": (10_000_000, SMALL), "large": (60_000_000, LARGE)}


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, UNMODELLED),
        (10_000_000, SMALL),
        (20_000_000, SMALL.scaled(2.0)),
        (30_000_000, LARGE.scaled(0.5)),
        (240_000_000, LARGE.scaled(4.0)),
    ],
)
def test_it_costs_what_the_nearest_in_size_does_by_parameters(size: int, expected: LinearCost) -> None:
    assert estimated_cost(size, KNOWN, TARGET) == expected


def test_without_another_model_it_is_a_share_of_the_target() -> None:
    cost = estimated_cost(5_000_000, {"lookup": (0, UNMODELLED)}, TARGET)
    assert cost == TARGET.scaled(SHARE_OF_TARGET)
    assert cost.knee_tokens == TARGET.knee_tokens


@pytest.mark.parametrize("size", [0, 1, 10_000_000, 10**12])
def test_it_is_never_free_or_nothing_would_be_learnt_of_it(size: int) -> None:
    assert estimated_cost(size, KNOWN, TARGET).seconds(1, 1, 0) > 0.0
