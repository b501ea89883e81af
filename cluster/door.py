"""Whether a newcomer is taken, on which terms, and if not, when to come back (docs/objectives.md)."""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from cluster import admission
from cluster.batching.batcher import Batcher
from cluster.batching.common import arrival_order
from cluster.config import FlotillaConfig
from cluster.cost_model import CostModel
from cluster.drafter_pool import DrafterPool
from cluster.forecast import Forecast, Schedule
from cluster.planning import StepPlanner
from cluster.requests import Request
from cluster.stream_messages import Objective, Prediction, Rejected, Submit, Terms
from cluster.tier_config import TierConfig
from cluster.verify_calls import VerifyCalls

# What was told a client is judged by the load no longer after the time it was told for.
PROMISE_S = 1.0
# Most points in time that are tried for one.
MOST_TRIED = 64
# Promises that are remembered: each holds a prompt, and an overload makes thousands a second. So many fill
# any queue several times, so that more of them would not change what is told.
MOST_PROMISED = 1024
# Times told are stretched, by as much more after each that was too early and as much less after each that
# was not: four of five come true in the long run. At first, twice as long.
TOO_EARLY, IN_TIME = 1.15, 0.97
FIRST_STRETCH, MOST_STRETCH = 2.0, 16.0


class Cell(admission.CellState, Protocol):
    """What is read of the scheduler."""

    running: dict[str, Request]
    free_slots: int
    pool: DrafterPool
    batcher: Batcher
    planner: StepPlanner
    verify_calls: VerifyCalls


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that is taken.

    Attributes:
        submit: with the terms it is served on.
        predicted: its latencies; None while there is no target to predict from.
    """

    submit: Submit
    predicted: Prediction | None = None


@dataclass(frozen=True, slots=True, order=True)
class Promise:
    """A client was told to come back at a time, when its request would be taken on one of these terms."""

    at: float
    submit: Submit = field(compare=False)
    terms: tuple[Terms, ...] = field(compare=False)


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
    _promised: list[Promise] = field(default_factory=list)
    _stretch: float = FIRST_STRETCH

    def __post_init__(self) -> None:
        scheduler = self.config.scheduler
        self.forecast = Forecast(self.cost, scheduler.prefill_chunk, scheduler.max_running)

    def decide(self, submit: Submit, cell: Cell, now: float) -> Admitted | Rejected:
        """Take the request, on lower terms if it must and may be so, or refuse it.

        What was admitted once, and comes again with output because its cell was lost, is not refused for
        an objective.
        """
        self._keep_promises(cell, now)
        rejection = admission.check(submit, cell) or self._full(submit, cell, now)
        if rejection is not None:
            return rejection
        if cell.verifier is None:
            return Admitted(submit)
        asked = Terms(tier=submit.tier, objective=submit.objective, priority=submit.priority)
        first = predicted = self._predict(submit, asked, cell, now)
        if submit.on_miss == "serve" or not self._missed(asked.objective, predicted):
            return Admitted(submit, predicted)
        for terms in submit.downgrades if submit.on_miss == "downgrade" else ():
            predicted = self._predict(submit, terms, cell, now)
            is_open = len(cell.waiting) < self._most_waiting(terms.tier)
            if is_open and not self._missed(terms.objective, predicted):
                return Admitted(_on(submit, terms), predicted)
        if submit.output:
            return Admitted(submit, first)
        return self._refuse(submit, asked, first, cell, now)

    # Objectives

    def _predict(self, submit: Submit, terms: Terms, cell: Cell, now: float) -> Prediction:
        schedule = self._schedule(submit, terms, cell, now)
        call = cell.verify_calls.outstanding
        busy_s = 0.0 if call is None else max(0.0, call.sent_at + call.predicted_s - now)
        return self.forecast.predict(
            submit, cell.running.values(), schedule, drafts=bool(cell.pool.drafters), busy_s=busy_s
        )

    def _schedule(self, submit: Submit, terms: Terms, cell: Cell, now: float) -> Schedule:
        """When those here and the newcomer would begin and end; the rule says who is admitted now."""
        running, drafts = cell.running.values(), bool(cell.pool.drafters)
        batcher, context = cell.batcher, cell.batcher.context(now, cell.free_slots, cell.planner.step_s)
        newcomer = Request(_on(submit, terms), "", now, sys.maxsize)
        place = bisect_right(cell.waiting, arrival_order(newcomer), key=arrival_order)
        queue = [*cell.waiting[:place], newcomer, *cell.waiting[place:]]
        if newcomer in batcher.would_admit(queue, running, context).admitted:
            return self.forecast.schedule(running, (), is_full=False, drafts=drafts, starts_only=True)
        ordered = batcher.in_order(queue, context)
        ahead = ordered[: ordered.index(newcomer)]
        return self.forecast.schedule(running, ahead, is_full=True, drafts=drafts, starts_only=True)

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
    ) -> Admitted | Rejected:
        candidates = [asked, *(submit.downgrades if submit.on_miss == "downgrade" else ())]
        alone = self.forecast.alone(submit, drafts=bool(cell.pool.drafters))
        hoped = [terms for terms in candidates if not self._missed(terms.objective, alone)]
        if not hoped:
            message = (
                f"{_compared(asked.objective, alone)} even if nothing else is served; ask for less, or for "
                "slo.on_miss serve"
            )
            return Rejected(
                request_id=submit.request_id, code="slo_infeasible", message=message, predicted=alone
            )
        if not cell.requests:  # there is no load that could fall: only serving it tells
            return Admitted(_on(submit, hoped[0]), predicted)
        retry_after_s = min(self._met_after_s(submit, terms, cell, now) for terms in hoped)
        retry_after_s = self._promise(retry_after_s, submit, tuple(hoped), now)
        return Rejected(
            request_id=submit.request_id,
            code="saturated",
            message=f"{_compared(asked.objective, predicted)} at the present load; try again in "
            f"{retry_after_s:.0f} s, or ask for slo.on_miss serve",
            retry_after_s=retry_after_s,
            predicted=predicted,
        )

    def _met_after_s(self, submit: Submit, terms: Terms, cell: Cell, now: float) -> float:
        """Seconds until the request would meet the terms, if nobody came but those promised."""
        drafts, running = bool(cell.pool.drafters), cell.running.values()
        own = self._schedule(submit, terms, cell, now)
        # Whoever waits takes the places that become free, so the load does not fall before.
        everybody = self.forecast.schedule(running, cell.waiting, is_full=bool(cell.waiting), drafts=drafts)
        schedule = replace(everybody, start_s=own.start_s)
        ends = schedule.ends_s[:: max(1, len(schedule.ends_s) // MOST_TRIED)]
        last_s = schedule.ends_s[-1] if schedule.ends_s else 0.0
        times = sorted({*ends, *(last_s * part / MOST_TRIED for part in range(1, MOST_TRIED + 1))})
        left = self.forecast.prompts_s(running, cell.waiting, schedule.starts_s, times)
        for time_s, prompts_s in zip(times, left, strict=True):
            predicted = self.forecast.predict(
                submit,
                running,
                schedule,
                drafts=drafts,
                after_s=time_s + 1e-6,
                more=self._num_promised(now, time_s, submit),
                prompts_s=prompts_s,
            )
            if not self._missed(terms.objective, predicted, 0.0):
                return time_s
        return last_s

    def _num_promised(self, now: float, after_s: float, submit: Submit) -> int:
        """How many of those told to come back will have done so by then."""
        return bisect_right(self._promised, now + max(1.0, self._stretch * after_s), key=lambda one: one.at)

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
        if submit.output and num_waiting < self.config.scheduler.max_waiting:
            return None
        label = submit.tenant.label
        num_own = cell.batcher.fair.num_waiting(label, cell.waiting)
        if self._has_place(num_own, limit - num_waiting):
            return None
        if num_waiting < limit:
            return self._too_many_own(submit, limit, num_own, cell, now)
        schedule = self.forecast.schedule(
            cell.running.values(), cell.waiting, is_full=True, drafts=bool(cell.pool.drafters)
        )
        last = num_waiting - limit + len(self._promised)
        starts = [*schedule.starts_s, schedule.start_s]
        retry_after_s = self._promise(starts[min(last, len(starts) - 1)], submit, (), now)
        kept = (
            "" if limit == self.config.scheduler.max_waiting else f", of {limit} open to tier {submit.tier}"
        )
        return Rejected(
            request_id=submit.request_id,
            code="queue_full",
            message=f"{num_waiting} requests are already waiting{kept}; try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    def _has_place(self, num_own: int, num_free: int) -> bool:
        """Whether a tenant with so many requests waiting may have one more beside so many free places.

        The dynamic thresholds of Choudhury and Hahne (IEEE/ACM Transactions on Networking, 1998): whoever
        has more than a multiple of what is free waits, so that some is always free for who has less.
        """
        return num_free > 0 and (num_own == 0 or num_own < self.config.fairness.queue_threshold * num_free)

    def _too_many_own(self, submit: Submit, limit: int, num_own: int, cell: Cell, now: float) -> Rejected:
        """The refusal of a tenant that has its part of the queue."""
        context = cell.batcher.context(now, cell.free_slots, cell.planner.step_s)
        ordered = cell.batcher.in_order(cell.waiting, context)
        running, drafts = cell.running.values(), bool(cell.pool.drafters)
        schedule = self.forecast.schedule(running, ordered, is_full=True, drafts=drafts)
        label, own, num_free = submit.tenant.label, num_own, limit - len(ordered)
        own += sum(promise.submit.tenant.label == label for promise in self._promised)
        after_s = schedule.start_s
        for request, start_s in zip(ordered, schedule.starts_s, strict=True):
            num_free += 1
            own -= request.submit.tenant.label == label
            if self._has_place(own, num_free):
                after_s = start_s
                break
        retry_after_s = self._promise(after_s, submit, (), now)
        return Rejected(
            request_id=submit.request_id,
            code="queue_full",
            message=f"{num_own} requests of this API key are already waiting, its part of {limit} places "
            f"of which {limit - len(ordered)} are kept for other keys; try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    # Promises

    def _promise(self, after_s: float, submit: Submit, terms: tuple[Terms, ...], now: float) -> float:
        after_s = min(self._stretch * max(1.0, after_s), self.config.admission.max_retry_after_s)
        if len(self._promised) < MOST_PROMISED:
            insort(self._promised, Promise(now + after_s, submit, terms))
        return after_s

    def _keep_promises(self, cell: Cell, now: float) -> None:
        """See whether those due were true: others came meanwhile, and do so again."""
        while self._promised and self._promised[0].at <= now:
            due = self._promised.pop(0)
            if now - due.at > PROMISE_S:
                continue  # nobody came at that time, so what would have been is not known
            num_own = cell.batcher.fair.num_waiting(due.submit.tenant.label, cell.waiting)
            num_free = self._most_waiting(due.submit.tier) - len(cell.waiting)
            is_open = self._has_place(num_own, num_free)
            is_true = is_open and (
                not due.terms
                or any(
                    not self._missed(terms.objective, self._predict(due.submit, terms, cell, now))
                    for terms in due.terms
                )
            )
            self._stretch = min(MOST_STRETCH, max(1.0, self._stretch * (IN_TIME if is_true else TOO_EARLY)))


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
