"""Whether a newcomer is taken, on which terms, and if not, when to come back (docs/objectives.md)."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from cluster import admission
from cluster.config import FlotillaConfig
from cluster.cost_model import CostModel
from cluster.drafter_pool import DrafterPool
from cluster.forecast import Forecast, Schedule
from cluster.requests import Request
from cluster.stream_messages import Objective, Prediction, Rejected, Submit, Terms
from cluster.tier_config import TierConfig

# A client told to come back is counted on until so long after the time it was told.
PROMISE_S = 1.0
# Most points in time that are tried for one.
MOST_TRIED = 64


class Cell(admission.CellState, Protocol):
    """What is read of the scheduler."""

    running: dict[str, Request]
    free_slots: int
    pool: DrafterPool


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that is taken.

    Attributes:
        submit: with the terms it is served on.
        predicted: its latencies; None while there is no target to predict from.
    """

    submit: Submit
    predicted: Prediction | None = None


@dataclass(slots=True)
class Door:
    """Decides on newcomers of one scheduler.

    Attributes:
        config: tiers, queue bounds, tolerance.
        cost: forward-time model of the target.
        forecast: what predicts.
    """

    config: FlotillaConfig
    cost: CostModel
    forecast: Forecast = field(init=False)
    _promised: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        scheduler = self.config.scheduler
        self.forecast = Forecast(self.cost, scheduler.prefill_chunk, scheduler.max_running)

    def decide(self, submit: Submit, cell: Cell, now: float) -> Admitted | Rejected:
        """Take the request, on lower terms if it must and may be so, or refuse it.

        What was admitted once, and comes again with output because its cell was lost, is not refused for
        an objective.
        """
        rejection = admission.check(submit, cell) or self._full(submit, cell, now)
        if rejection is not None:
            return rejection
        if cell.verifier is None:
            return Admitted(submit)
        asked = Terms(tier=submit.tier, objective=submit.objective, priority=submit.priority)
        first = predicted = self._predict(submit, asked, cell)
        if submit.on_miss == "serve" or not self._missed(asked.objective, predicted):
            return Admitted(submit, predicted)
        for terms in submit.downgrades if submit.on_miss == "downgrade" else ():
            predicted = self._predict(submit, terms, cell)
            is_open = len(cell.waiting) < self._most_waiting(terms.tier)
            if is_open and not self._missed(terms.objective, predicted):
                return Admitted(_on(submit, terms), predicted)
        if submit.output:
            return Admitted(submit, first)
        return self._refuse(submit, asked, first, cell, now)

    # Objectives

    def _predict(self, submit: Submit, terms: Terms, cell: Cell) -> Prediction:
        schedule = self._schedule(submit, terms, cell)
        return self.forecast.predict(submit, cell.running.values(), schedule, drafts=bool(cell.pool.drafters))

    def _schedule(self, submit: Submit, terms: Terms, cell: Cell) -> Schedule:
        place = bisect_right(cell.waiting, terms.priority, key=lambda request: request.submit.priority)
        num_slots = len(submit.prompt) + admission.GROWTH_RESERVE * (len(cell.running) + 1)
        is_full = bool(cell.waiting) or cell.free_slots < num_slots
        return self.forecast.schedule(
            cell.running.values(), cell.waiting[:place], is_full=is_full, drafts=bool(cell.pool.drafters)
        )

    def _missed(self, objective: Objective, predicted: Prediction, tolerance: float | None = None) -> bool:
        beyond = 1.0 + (self.config.admission.tolerance if tolerance is None else tolerance)
        return any(
            target is not None and latency > beyond * target
            for target, latency in (
                (objective.ttft_ms, predicted.ttft_ms),
                (objective.tpot_ms, predicted.tpot_ms),
                (objective.e2e_ms, predicted.e2e_ms),
            )
        )

    def _refuse(
        self, submit: Submit, asked: Terms, predicted: Prediction, cell: Cell, now: float
    ) -> Rejected:
        candidates = [asked, *(submit.downgrades if submit.on_miss == "downgrade" else ())]
        drafts = bool(cell.pool.drafters)
        alone = self.forecast.alone(submit, drafts=drafts)
        hoped = [terms for terms in candidates if not self._missed(terms.objective, alone)]
        if not hoped:
            message = (
                f"{_compared(asked.objective, alone)} even if nothing else is served; ask for less, or for "
                "slo.on_miss serve"
            )
            return Rejected(
                request_id=submit.request_id, code="slo_infeasible", message=message, predicted=alone
            )
        promised = self._num_promised(now)
        retry_after_s = min(self._met_after_s(submit, terms, cell, promised) for terms in hoped)
        retry_after_s = self._promise(retry_after_s, now)
        return Rejected(
            request_id=submit.request_id,
            code="saturated",
            message=f"{_compared(asked.objective, predicted)} at the present load; try again in "
            f"{retry_after_s:.0f} s, or ask for slo.on_miss serve",
            retry_after_s=retry_after_s,
            predicted=predicted,
        )

    def _met_after_s(self, submit: Submit, terms: Terms, cell: Cell, promised: int) -> float:
        """Seconds until the request would meet the terms, if nobody came but those promised."""
        drafts, running = bool(cell.pool.drafters), cell.running.values()
        schedule = self._schedule(submit, terms, cell)
        ends = schedule.ends_s[:: max(1, len(schedule.ends_s) // MOST_TRIED)]
        for end_s in ends:
            after_s = end_s + 1e-6
            predicted = self.forecast.predict(
                submit, running, schedule, drafts=drafts, after_s=after_s, more=promised
            )
            if not self._missed(terms.objective, predicted, 0.0):
                return end_s
        return schedule.ends_s[-1] if schedule.ends_s else 0.0

    # The queue

    def _most_waiting(self, tier: str) -> int:
        """Requests that may wait before newcomers of the tier are refused; the rest is for others."""
        most = self.config.scheduler.max_waiting
        share = self.config.tiers.get(tier, TierConfig()).open_share
        return most if share == 1.0 else min(most, max(1, int(most * share)))

    def _full(self, submit: Submit, cell: Cell, now: float) -> Rejected | None:
        """Why the queue does not take the request; None if it does."""
        limit = self._most_waiting(submit.tier)
        num_waiting = len(cell.waiting)
        if num_waiting < limit or (submit.output and num_waiting < self.config.scheduler.max_waiting):
            return None
        schedule = self.forecast.schedule(
            cell.running.values(), cell.waiting, is_full=True, drafts=bool(cell.pool.drafters)
        )
        last = num_waiting - limit + self._num_promised(now)
        starts = [*schedule.starts_s, schedule.start_s]
        retry_after_s = self._promise(starts[min(last, len(starts) - 1)], now)
        kept = (
            "" if limit == self.config.scheduler.max_waiting else f", of {limit} open to tier {submit.tier}"
        )
        return Rejected(
            request_id=submit.request_id,
            code="queue_full",
            message=f"{num_waiting} requests are already waiting{kept}; try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    # Promises

    def _num_promised(self, now: float) -> int:
        """Clients told to come back that are still to come."""
        while self._promised and self._promised[0] < now - PROMISE_S:
            self._promised.popleft()
        return len(self._promised)

    def _promise(self, after_s: float, now: float) -> float:
        after_s = min(max(1.0, after_s), self.config.admission.max_retry_after_s)
        self._promised.append(now + after_s)
        return after_s


def _on(submit: Submit, terms: Terms) -> Submit:
    return msgspec.structs.replace(
        submit, tier=terms.tier, objective=terms.objective, priority=terms.priority
    )


def _compared(objective: Objective, predicted: Prediction) -> str:
    """The predictions beside the objectives that they are held against."""
    pairs = (
        ("ttft_ms", objective.ttft_ms, predicted.ttft_ms),
        ("tpot_ms", objective.tpot_ms, predicted.tpot_ms),
        ("e2e_ms", objective.e2e_ms, predicted.e2e_ms),
    )
    told = [f"{name} {latency:.1f} for {target:.1f}" for name, target, latency in pairs if target is not None]
    return f"predicted {', '.join(told)} asked"
