"""Who asks for more than its share, by another way of sharing; and what that means at the door."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cluster.fair_shares import MARGIN, MEMORY_S, MOST_KEPT, FairShares
from cluster.promises import LATE_S
from cluster.stream_messages import Objective, Submit, Tenant
from tests.cluster.giving_way import Full

WEIGHTS = (0.5, 1.0, 4.0)
# Longer than a prompt takes by itself, shorter than the steps until somebody gives way.
SHORT_MS = 10.0


def shares(asked: Mapping[str, float], taken: float, weights: Mapping[str, float]) -> FairShares:
    found = FairShares()
    for label, charge in asked.items():
        found.asked(label, charge, weights.get(label, 1.0), 0.0)
    found.took(taken, 1.0, 0.0)
    return found


def share(asked: Mapping[str, float], taken: float, weights: Mapping[str, float]) -> float:
    """What each may have, by weight: who wants least is served first, and leaves the rest to the others."""
    left, weight = taken, sum(weights.values())
    for label in sorted(asked, key=asked.__getitem__):
        if asked[label] * weight >= left:
            return left / weight
        left -= asked[label] * weights[label]
        weight -= weights[label]
    return float("inf")


@given(
    st.lists(st.tuples(st.floats(0.1, 100.0), st.sampled_from(WEIGHTS)), min_size=1, max_size=6),
    st.floats(0.1, 200.0),
)
def test_it_is_who_asks_for_more_than_is_left_for_it(
    tenants: list[tuple[float, float]], taken: float
) -> None:
    asked = {f"t{number}": charge for number, (charge, _) in enumerate(tenants)}
    weights = {f"t{number}": weight for number, (_, weight) in enumerate(tenants)}
    level, most = share(asked, taken, weights), max(asked.values())
    found = shares(asked, taken, weights)
    for label, charge in asked.items():
        for edge in (level, MARGIN * level, most / MARGIN):
            assume(abs(charge - edge) > 1e-6 * charge)
        is_above = charge > MARGIN * level or (charge > level and charge > most / MARGIN)
        assert found.asks_for_more(label, 0.0) is is_above


def test_who_asks_for_its_part_is_left_alone_beside_one_who_asks_for_everything() -> None:
    """Each of the others asks for 24 % of what is taken, and by chance for more than a quarter at times."""
    for chance in (0.9, 1.0, 1.2):
        found = shares({"greedy": 340.0, "one": 24.0 * chance, "two": 24.0, "three": 24.0}, 100.0, {})
        assert found.asks_for_more("greedy", 0.0)
        assert not any(found.asks_for_more(label, 0.0) for label in ("one", "two", "three", "nobody"))


def test_where_all_ask_for_too_much_all_are_to_leave_some() -> None:
    found = shares({"one": 30.0, "two": 30.0, "three": 33.0}, 80.0, {})
    assert all(found.asks_for_more(label, 0.0) for label in ("one", "two", "three"))
    alone = shares({"": 30.0}, 29.0, {})
    assert alone.asks_for_more("", 0.0)


def test_where_all_is_taken_nobody_asks_for_more() -> None:
    found = shares({"greedy": 340.0, "one": 24.0}, 365.0, {})
    assert not any(found.asks_for_more(label, 0.0) for label in ("greedy", "one"))


def test_what_was_asked_for_fades_and_few_tenants_are_remembered() -> None:
    found = shares({"greedy": 340.0, "one": 24.0}, 100.0, {})
    later = 5 * MEMORY_S
    found.asked("one", 24.0, 1.0, later)
    found.took(24.0, 1.0, later)
    assert not found.asks_for_more("greedy", later)
    for number in range(3 * MOST_KEPT):
        found.asked(f"t{number}", 1.0, 1.0, later)
    assert len(found._asked) == MOST_KEPT


class Late(Full):
    """Whoever is taken is late, so that predictions must lie far below objectives; and all are told times."""

    def __init__(self) -> None:
        super().__init__()
        self.core.door.headroom._value, self.core.door.headroom._at = 0.8, self.now
        for label in ("greedy", "one"):
            told = Submit(request_id=f"of {label}", prompt=[7], sampling=self.long, tenant=Tenant(label))
            self.core.door.promises.make(told, 3.0, 0.1, self.now, may_be_near=True)

    def is_taken(self, name: str, label: str, ttft_ms: float) -> bool:
        asked: dict[str, Any] = {"tenant": Tenant(label), "objective": Objective(ttft_ms=ttft_ms)}
        self.ask(name, on_miss="reject", **asked)
        return name not in self.rejected


def test_room_is_kept_for_those_who_come_as_told_by_who_asks_for_more_than_its_share() -> None:
    world, soon_ms = Late(), 60.0
    for number in range(30):
        world.is_taken(f"greedy {number}", "greedy", SHORT_MS)
    assert len(world.rejected) == 30
    assert world.core.door.shares.asks_for_more("greedy", world.now)
    assert not world.is_taken("greedy", "greedy", soon_ms)
    assert world.rejected["greedy"] == "saturated"
    assert world.is_taken("one", "one", soon_ms)


@pytest.mark.parametrize(("apart_s", "num_counted"), [(0.5, 1), (1.0, 1), (LATE_S + 2.0, 2)])
def test_who_asks_again_before_its_time_or_as_told_has_asked_once(apart_s: float, num_counted: int) -> None:
    world = Full()
    charges: list[float] = []
    for number in range(2):
        world.ask(f"r{number}", on_miss="reject", tenant=Tenant("one"), objective=Objective(ttft_ms=SHORT_MS))
        assert world.rejected[f"r{number}"] == "saturated"
        charges.append(world.core.door.shares._asked["one"].faded(world.now) * MEMORY_S)
        world.now += apart_s - 0.003  # as it comes a little later than it is sent
    faded = charges[0] * math.exp(-apart_s / MEMORY_S)
    assert charges[1] - faded == pytest.approx((num_counted - 1) * charges[0], abs=0.1)
    fair = world.core.batcher.fair
    assert charges[0] == pytest.approx(fair.charge(world.submitted["r0"]), rel=0.01)
