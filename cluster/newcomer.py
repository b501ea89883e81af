"""A request that asks to be taken, and where it would stand among those who wait."""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from cluster import admission
from cluster.batching.batcher import Batcher
from cluster.batching.common import arrival_order
from cluster.drafter_pool import DrafterPool
from cluster.planning import StepPlanner
from cluster.requests import Request
from cluster.stream_messages import Submit, Terms
from cluster.verify_calls import VerifyCalls


class Cell(admission.CellState, Protocol):
    """What is read of the scheduler where it decides on newcomers."""

    running: dict[str, Request]
    free_slots: int
    pool: DrafterPool
    batcher: Batcher
    planner: StepPlanner
    verify_calls: VerifyCalls


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a newcomer would stand on some terms.

    Attributes:
        request: what it would be.
        ahead: who of those waiting is expected to be admitted before it, in that order; None if it would
            be admitted now.
        running: who runs when those are who are admitted now, for whom others may give way.
        queued: who of those ahead waits on then.
    """

    request: Request
    ahead: list[Request] | None
    running: list[Request]
    queued: list[Request]


@dataclass(slots=True)
class Newcomer:
    """A request at the moment in which it is decided on.

    A refusal asks several times where it would stand, of a long queue, in an overload: it is worked out once.

    Attributes:
        submit: what was sent.
        cell: to whom.
        now: the scheduler's clock, in seconds.
    """

    submit: Submit
    cell: Cell
    now: float
    _standings: dict[Terms, Standing] = field(default_factory=dict)

    def standing(self, terms: Terms) -> Standing:
        """Where it would stand on these terms, while there is a target."""
        found = self._standings.get(terms)
        if found is None:
            found = self._standings[terms] = self._stood(terms)
        return found

    def _stood(self, terms: Terms) -> Standing:
        cell = self.cell
        batcher, running, waiting = cell.batcher, cell.running.values(), cell.waiting
        request = Request(on_terms(self.submit, terms), "", self.now, sys.maxsize)
        place = bisect_right(waiting, arrival_order(request), key=arrival_order)
        queue = [*waiting[:place], request, *waiting[place:]]
        context = batcher.context(self.now, cell.free_slots, cell.planner.step_s)
        turn = batcher.ahead_of(request, queue, running, context)
        begin, leave = turn.admission.admitted, turn.admission.preempted
        remaining = [one for one in running if one not in leave] if leave else [*running]
        remaining += [one for one in begin if one is not request]
        ahead = turn.ahead or []
        return Standing(
            request, turn.ahead, remaining, [r for r in ahead if r not in begin] if begin else ahead
        )

    def queue_in_order(self) -> list[Request]:
        """Those who wait, as they are expected to be admitted if nobody comes."""
        cell = self.cell
        context = cell.batcher.context(self.now, cell.free_slots, cell.planner.step_s)
        return cell.batcher.in_order(cell.waiting, cell.running.values(), context)


def on_terms(submit: Submit, terms: Terms) -> Submit:
    """The request on other terms than it asked for, or the same."""
    return msgspec.structs.replace(
        submit, tier=terms.tier, objective=terms.objective, priority=terms.priority
    )
