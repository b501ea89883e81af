"""The headroom finds, without being told, what keeps the share of late ones."""

from __future__ import annotations

import math
import random

import pytest

from cluster.headroom import FIRST, LATE_SHARE, LEAST, MEMORY_S, MOST, Headroom


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
