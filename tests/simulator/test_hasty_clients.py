"""A simulated cell in an overload: clients that ask again every second, beside those who wait as told."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cluster.events import Action, Reject
from simulator import workloads
from simulator.run import Cell
from tests.simulator.test_fair_overload import OBJECTIVES, PROFILE, SATURATED, Overloaded, halved

DURING_S = 12.0


class Insisting(Overloaded):
    """Whoever is refused asks until taken, under its id with one more "+": half of them every second."""

    def __init__(self, *, some_are_hasty: bool) -> None:
        super().__init__(fair=True)
        self.some_are_hasty = some_are_hasty
        self.num_asked = 0

    def is_hasty(self, name: str) -> bool:
        return self.some_are_hasty and int(name.rstrip("+")) % 2 == 1

    def _act(self, action: Action) -> None:
        Cell._act(self, action)
        if isinstance(action, Reject):
            name, after_s = action.rejection.request_id, action.rejection.retry_after_s
            assert after_s is not None
            at = self.clock.now + (1.0 if self.is_hasty(name) else math.ceil(after_s))
            self.num_asked += 1
            self.submit(replace(self.requests[name], request_id=f"{name}+", arrival_s=at))

    def waits_s(self, *, hasty: bool) -> list[float]:
        """From the first time that each asked to that at which it was taken."""
        return [
            self.requests[name].arrival_s - self.requests[name.rstrip("+")].arrival_s
            for name in self.receipts
            if self.is_hasty(name) == hasty
        ]


def overloaded(*, some_are_hasty: bool) -> Insisting:
    """Twice what it can do."""
    cell = Insisting(some_are_hasty=some_are_hasty)
    shapes = halved(round(2.0 * SATURATED * DURING_S), 1)
    made = workloads.arrive(shapes, PROFILE.baseline_s(), rate=2.0 * SATURATED, seed=1)
    for place, request in enumerate(made):
        tier = "interactive" if place % 10 < 3 else "standard"
        asked = replace(
            request, request_id=str(place), kind=tier, objective=OBJECTIVES[tier], on_miss="reject"
        )
        cell.submit(asked)
    cell.run()
    assert len(cell.receipts) == len(made)
    return cell


@pytest.mark.thorough
def test_who_waits_as_told_does_not_wait_longer_because_others_do_not() -> None:
    """Figures are in docs/objectives.md."""
    alone, beside = overloaded(some_are_hasty=False), overloaded(some_are_hasty=True)
    for cell in (alone, beside):
        for hasty in (False, True)[: 1 + cell.some_are_hasty]:
            waits = np.percentile(cell.waits_s(hasty=hasty), [50, 90])
            print(f"hasty {hasty}: {waits} s, {cell.num_asked} asked again")
    usual_s, found_s = (np.percentile(cell.waits_s(hasty=False), 90) for cell in (alone, beside))
    assert found_s < 1.3 * usual_s
