"""The headroom finds, without being told, what keeps the share of late ones."""

from __future__ import annotations

import math
import random

import pytest

from cluster.headroom import (
    ANYWAY_MEMORY_S,
    FIRST,
    LATE_SHARE,
    LEAST,
    MEMORY_S,
    MOST,
    BackgroundHeadroom,
    Headroom,
)


@pytest.mark.parametrize("bias", [1.0, 1.3])
@pytest.mark.parametrize("spread", [0.1, 0.3, 0.5])
def test_few_of_those_taken_are_late(spread: float, bias: float) -> None:
    """Requests are predicted to take anything up to their objective, and take a random multiple of that."""
    rng, headroom = random.Random(1), Headroom()
    taken = late = 0
    for number in range(20_000):
        now = 0.1 * number
        predicted = rng.uniform(0.2, 1.0)
        if predicted > 1.0 - headroom.value(now):
            continue
        is_late = predicted * bias * math.exp(rng.gauss(0.0, spread)) > 1.0
        headroom.ended(now, is_late=is_late)
        if number > 5_000:
            taken += 1
            late += is_late
    assert taken > 500
    assert late / taken < LATE_SHARE + 0.05


def test_it_is_bounded_and_fades() -> None:
    headroom = Headroom()
    assert headroom.value(0.0) == FIRST
    assert headroom.scarcity(0.0) == 0.0
    for _ in range(100):
        headroom.ended(10.0, is_late=True)
    assert headroom.value(10.0) == pytest.approx(MOST)
    assert headroom.scarcity(10.0) == pytest.approx(1.0)
    assert headroom.value(10.0 + MEMORY_S) == pytest.approx(FIRST + (MOST - FIRST) / math.e)
    for _ in range(1000):
        headroom.ended(20.0, is_late=False)
    assert headroom.value(20.0) == pytest.approx(LEAST)
    assert headroom.scarcity(20.0) == 0.0
    assert headroom.value(20.0 + 10 * MEMORY_S) == pytest.approx(FIRST, abs=1e-4)


@pytest.mark.parametrize("anyway", [0.0, 0.3])
def test_the_background_leaves_more_only_for_those_late_because_of_it(anyway: float) -> None:
    """Beside it as many are late as without it, and then a tenth more."""
    rng = random.Random(2)
    found = []
    for more in (0.0, 0.1):
        headroom, values = BackgroundHeadroom(), []
        for number in range(6_000):
            now, is_beside = 0.1 * number, number % 4 > 0
            is_late = rng.random() < anyway + more * is_beside
            headroom.ended(now, is_late=is_late, is_beside=is_beside)
            values.append(headroom.value(now))
        assert headroom.late_anyway(now) == pytest.approx(anyway, abs=0.15)
        found.append(sum(values[1_000:]) / 5_000)
    assert found[0] < 0.42 < 0.5 < found[1]


def test_what_is_late_anyway_fades_while_nobody_tells() -> None:
    headroom = BackgroundHeadroom()
    for _ in range(500):
        headroom.ended(10.0, is_late=True, is_beside=False)
    assert headroom.late_anyway(10.0) == pytest.approx(1.0, abs=1e-3)
    headroom.ended(10.0, is_late=True, is_beside=True)
    assert headroom.late_anyway(10.0 + ANYWAY_MEMORY_S) == pytest.approx(1 / math.e, abs=1e-3)
