"""Whether a newcomer is taken, on which terms, and if not, when to come back (docs/objectives.md)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from cluster import admission
from cluster.arrival_rates import ArrivalRates
from cluster.batching.background import is_in_steps
from cluster.chunk_size import chunk_tokens
from cluster.config import FlotillaConfig
from cluster.cost_model import CostModel
from cluster.fair_shares import FairShares
from cluster.forecast import Forecast, Schedule
from cluster.headroom import BackgroundHeadroom, Headroom
from cluster.newcomer import Cell, Newcomer, on_terms
from cluster.outages import Outages
from cluster.passing import expected
from cluster.predicted_misses import compared, exceeds
from cluster.promises import Promises
from cluster.requests import Request
from cluster.stream_messages import Objective, Prediction, Receipt, Rejected, Submit, Terms
from cluster.tier_config import TierConfig
from cluster.violations import missed

# Most points in time that are tried for one to come back at.
MOST_TRIED = 64
# The load falls later than predicted: times are stretched by as much more after each client that came back
# in vain and as much less after each that was taken. At first, half as long again.
TOO_EARLY, IN_TIME = 1.15, 0.97
FIRST_STRETCH, MOST_STRETCH = 1.5, 16.0


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
        headroom: by which newcomers of a tenant must be on time while it has more than its share, and
            others of it are told to come back, so that those find room.
        background_headroom: what the background leaves of objectives; learned here, used by the batcher.
        forecast: what predicts.
    """

    config: FlotillaConfig
    cost: CostModel
    headroom: Headroom = field(default_factory=Headroom)
    background_headroom: BackgroundHeadroom = field(default_factory=BackgroundHeadroom)
    forecast: Forecast = field(init=False)
    promises: Promises = field(init=False)
    rates: ArrivalRates = field(default_factory=ArrivalRates)
    shares: FairShares = field(default_factory=FairShares)
    outages: Outages = field(default_factory=Outages)
    _stretch: float = FIRST_STRETCH
    # When all those here would begin and end if nobody came, for as long as nothing but refusals happens.
    _everybody: Schedule | None = None

    def __post_init__(self) -> None:
        scheduler = self.config.scheduler
        chunk = chunk_tokens(scheduler, self.cost.profile.target)
        self.forecast = Forecast(self.cost, chunk, scheduler.max_running)
        self.promises = Promises(self.config.admission.max_retry_after_s)

    def ended(
        self, request: Request, reason: str, receipt: Receipt, now: float, running: Iterable[Request]
    ) -> None:
        """A request ended, beside those who run on; how well it was predicted is learned from."""
        self.forecast.ended(request, reason)
        objective, predicted = request.submit.objective, request.predicted
        if predicted is None or reason not in ("stop", "length"):
            return
        if request.submit.resumed is not None:
            return  # what an outage cost it was not to be predicted
        misses = missed(objective, receipt)
        if misses and not exceeds(objective, predicted, self.config.admission.tolerance):
            is_late = any(misses.values())
            self.headroom.ended(now, is_late=is_late)
            self.background_headroom.ended(now, is_late=is_late, is_beside=is_in_steps(running))

    def has_changed(self) -> None:
        """Something else than a refusal happened: who is here may begin and end at other times."""
        self._everybody = None

    def lost(self, now: float) -> None:
        """The target is lost."""
        self.outages.lost(now)
        self.forecast.idle()

    def decide(self, submit: Submit, cell: Cell, now: float) -> Admitted | Rejected:
        """Take the request, on lower terms if it must and may be so, or refuse it.

        What was admitted once, and comes again with output because its cell was lost, is not refused for
        an objective.
        """
        self.promises.expire(now)
        is_promised = self.promises.keep(submit, now)
        if is_promised:
            submit = self._as_promised(submit)
        elif not (submit.was_taken or submit.output or self.promises.is_early(submit, now)):
            fair = cell.batcher.fair
            self.shares.asked(submit.tenant.label, fair.charge(submit), fair.weight(submit), now)
        answer = self._decided(Newcomer(submit, cell, now), is_promised=is_promised)
        if isinstance(answer, Admitted):
            if not is_promised:
                self.promises.took(submit, now)
            charge = cell.batcher.fair.charge(answer.submit)
            self.rates.took(submit.tenant.label, answer.submit.priority, charge, now)
            self.shares.took(charge, cell.batcher.fair.weight(answer.submit), now)
        if is_promised and cell.verifier is not None:  # else it is no load that should have fallen
            stretch = self._stretch * (IN_TIME if isinstance(answer, Admitted) else TOO_EARLY)
            self._stretch = min(MOST_STRETCH, max(1.0, stretch))
        return answer

    def _decided(self, newcomer: Newcomer, *, is_promised: bool) -> Admitted | Rejected:
        submit, cell, now = newcomer.submit, newcomer.cell, newcomer.now
        rejection = admission.check(submit, cell)
        if rejection is not None:
            if rejection.code == "not_ready" and cell.limits is not None:  # it was lost, and comes again
                return msgspec.structs.replace(rejection, retry_after_s=self.outages.left_s(now))
            return rejection
        rejection = self._full(submit, cell, now, is_promised=is_promised)
        if rejection is not None:
            return rejection
        if cell.verifier is None and (cell.limits is None or submit.on_miss == "serve"):
            return Admitted(submit)
        asked = Terms(tier=submit.tier, objective=submit.objective, priority=submit.priority)
        first = predicted = self._predict(newcomer, asked, is_promised=is_promised)
        if submit.on_miss == "serve" or not self._missed(newcomer, asked, predicted, is_promised=is_promised):
            return Admitted(submit, predicted)
        for terms in submit.downgrades if submit.on_miss == "downgrade" else ():
            predicted = self._predict(newcomer, terms, is_promised=is_promised)
            is_open = len(cell.waiting) < self._most_waiting(terms.tier)
            if is_open and not self._missed(newcomer, terms, predicted, is_promised=is_promised):
                return Admitted(on_terms(submit, terms), predicted)
        if submit.output:
            return Admitted(submit, first)
        return self._refuse(newcomer, asked, first)

    # Objectives

    def _predict(self, newcomer: Newcomer, terms: Terms, *, is_promised: bool = False) -> Prediction:
        submit, cell = newcomer.submit, newcomer.cell
        schedule = self._schedule(newcomer, terms, is_promised=is_promised)
        drafts, busy_s = bool(cell.pool.drafters), cell.verify_calls.left_s(newcomer.now)
        running = cell.running.values()
        num_sent = sum(map(cell.verify_calls.num_reading, running))
        predicted = self.forecast.predict(
            submit, running, schedule, drafts=drafts, busy_s=busy_s, num_sent=num_sent
        )
        return predicted.later(submit.waited_s) if submit.waited_s else predicted

    def _schedule(self, newcomer: Newcomer, terms: Terms, *, is_promised: bool = False) -> Schedule:
        """When those here and the newcomer would begin and end; the rule says who is admitted now."""
        cell, now = newcomer.cell, newcomer.now
        drafts = bool(cell.pool.drafters)
        if cell.verifier is None:
            return self._in_turn(newcomer.queue_in_order(), cell, now)
        standing = newcomer.standing(terms)
        running = standing.running
        if standing.ahead is None:
            return self.forecast.schedule(running, (), is_full=False, drafts=drafts, starts_only=True)
        passing = expected(
            standing.request,
            standing.ahead,
            cell.waiting,
            cell.batcher.fair,
            self.rates,
            self.promises,
            now,
            is_promised=is_promised,
        )
        return self.forecast.schedule(
            running, standing.queued, is_full=True, drafts=drafts, starts_only=True, passing=passing
        )

    def _in_turn(self, ordered: Sequence[Request], cell: Cell, now: float) -> Schedule:
        """When all those here would begin and end, and a newcomer after them; with a target or without."""
        drafts, left_s = bool(cell.pool.drafters), self.outages.left_s(now)
        if cell.verifier is not None:
            running = cell.running.values()
            return self.forecast.schedule(running, ordered, is_full=bool(ordered), drafts=drafts)
        schedule = self.forecast.schedule((), ordered, is_full=False, drafts=drafts)
        return Schedule(
            left_s + schedule.start_s,
            [left_s + start_s for start_s in schedule.starts_s],
            [left_s + end_s for end_s in schedule.ends_s],
            schedule.places,
        )

    def _all_in_turn(self, cell: Cell, now: float) -> Schedule:
        """The same of all who wait as they came: once for all refusals that find the cell as it is."""
        if cell.verifier is None:  # its return comes nearer
            return self._in_turn(cell.waiting, cell, now)
        if self._everybody is None:
            self._everybody = self._in_turn(cell.waiting, cell, now)
        return self._everybody

    def _missed(
        self, newcomer: Newcomer, terms: Terms, predicted: Prediction, *, is_promised: bool = False
    ) -> bool:
        label, now = newcomer.submit.tenant.label, newcomer.now
        if self.promises.is_due(label, now) and self.shares.asks_for_more(label, now):
            return exceeds(terms.objective, predicted, 0.0 if is_promised else -self.headroom.value(now))
        return exceeds(terms.objective, predicted, self.config.admission.tolerance)

    def _refuse(self, newcomer: Newcomer, asked: Terms, predicted: Prediction) -> Admitted | Rejected:
        submit, cell, now = newcomer.submit, newcomer.cell, newcomer.now
        candidates = [asked, *(submit.downgrades if submit.on_miss == "downgrade" else ())]
        alone = self.forecast.alone(submit, drafts=bool(cell.pool.drafters))
        tolerance = self.config.admission.tolerance
        hoped = [terms for terms in candidates if not exceeds(terms.objective, alone, tolerance)]
        if not hoped:
            message = (
                f"{compared(asked.objective, alone)} even if nothing else is served; ask for less, or for "
                "slo.on_miss serve"
            )
            return Rejected(
                request_id=submit.request_id, code="slo_infeasible", message=message, predicted=alone
            )
        if not cell.requests and cell.verifier is not None:
            # There is no load that could fall: only serving it tells.
            return Admitted(on_terms(submit, hoped[0]), predicted)
        retry_after_s = min(self._met_after_s(newcomer, terms) for terms in hoped)
        # Where it is not for those promised that there is no room, the next seconds bring none either.
        as_promised = self._predict(newcomer, asked, is_promised=True)
        is_out = cell.verifier is None
        may_be_near = is_out or not self._missed(newcomer, asked, as_promised, is_promised=True)
        retry_after_s = self._promise(retry_after_s, submit, cell, now, may_be_near=may_be_near)
        is_kept = not exceeds(asked.objective, predicted, tolerance)
        kept = ", with room kept for clients told to come back now" if is_kept else ""
        return Rejected(
            request_id=submit.request_id,
            code="saturated",
            message=f"{compared(asked.objective, predicted)} at the present load{kept}; try again in "
            f"{retry_after_s:.0f} s, or ask for slo.on_miss serve",
            retry_after_s=retry_after_s,
            predicted=predicted,
        )

    def _met_after_s(self, newcomer: Newcomer, terms: Terms) -> float:
        """Seconds until the request would meet the terms, if nobody came."""
        submit, cell = newcomer.submit, newcomer.cell
        drafts, running = bool(cell.pool.drafters), cell.running.values()
        own = self._schedule(newcomer, terms)
        if cell.verifier is None:
            return own.start_s
        # Whoever waits takes the places that become free, so the load does not fall before.
        everybody = self._all_in_turn(cell, newcomer.now)
        schedule = replace(everybody, start_s=own.start_s)
        ends = schedule.ends_s[:: max(1, len(schedule.ends_s) // MOST_TRIED)]
        last_s = schedule.ends_s[-1] if schedule.ends_s else 0.0
        times = sorted({*ends, *(last_s * part / MOST_TRIED for part in range(1, MOST_TRIED + 1))})
        left = self.forecast.prompts_s(running, cell.waiting, schedule.starts_s, times)

        def is_met(index: int) -> bool:
            predicted = self.forecast.predict(
                submit,
                running,
                schedule,
                drafts=drafts,
                after_s=times[index] + 1e-6,
                prompts_s=left[index],
            )
            return not exceeds(terms.objective, predicted, 0.0)

        # The load falls. Where prompts that begin meanwhile raise it for a while, a later time may be told.
        first = bisect_left(range(len(times)), True, key=is_met)
        return times[first] if first < len(times) else last_s

    # The queue

    def _most_waiting(self, tier: str) -> int:
        """Requests that may wait before newcomers of the tier are refused; the rest is for others."""
        most = self.config.scheduler.max_waiting
        share = self.config.tiers.get(tier, TierConfig()).open_share
        return most if share == 1.0 else min(most, max(1, int(most * share)))

    def _full(self, submit: Submit, cell: Cell, now: float, *, is_promised: bool) -> Rejected | None:
        """Why the queue does not take the request; None if it does."""
        limit = self._most_waiting(submit.tier)
        num_waiting = len(cell.waiting)
        is_owed = is_promised or submit.was_taken or submit.output
        if is_owed and num_waiting < self.config.scheduler.max_waiting:
            return None
        label = submit.tenant.label
        before = [request for request in cell.waiting if self._is_held_against(request, submit, cell)]
        num_own = cell.batcher.fair.num_waiting(label, before)
        if self._has_place(num_own, limit - num_waiting):
            return None
        if num_waiting < limit:
            return self._too_many_own(submit, limit, num_own, cell, now)
        schedule = self._all_in_turn(cell, now)
        starts = [*schedule.starts_s, schedule.start_s]
        after_s = starts[min(num_waiting - limit, num_waiting)]
        is_open = limit == self.config.scheduler.max_waiting
        retry_after_s = self._promise(after_s, submit, cell, now, may_be_near=is_open)
        kept = (
            "" if limit == self.config.scheduler.max_waiting else f", of {limit} open to tier {submit.tier}"
        )
        return Rejected(
            request_id=submit.request_id,
            code="queue_full",
            message=f"{_counted(num_waiting)} already waiting{kept}; try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    def _is_held_against(self, waiting: Request, submit: Submit, cell: Cell) -> bool:
        """Whether a waiting request counts where the newcomer's tenant has its part of the queue.

        What is of a less urgent tier waits behind and does not. A priority that a client names says nothing
        here: by counting it down, one tenant could fill the queue.
        """
        of_tier = cell.batcher.fair.tier_priorities
        return of_tier.get(waiting.submit.tier, 0) <= of_tier.get(submit.tier, 0)

    def _has_place(self, num_own: int, num_free: int) -> bool:
        """Whether a tenant with so many requests waiting may have one more beside so many free places.

        The dynamic thresholds of Choudhury and Hahne (IEEE/ACM Transactions on Networking, 1998): whoever
        has more than a multiple of what is free waits, so that some is always free for who has less.
        """
        return num_free > 0 and (num_own == 0 or num_own < self.config.fairness.queue_threshold * num_free)

    def _too_many_own(self, submit: Submit, limit: int, num_own: int, cell: Cell, now: float) -> Rejected:
        """The refusal of a tenant that has its part of the queue."""
        ordered = Newcomer(submit, cell, now).queue_in_order()
        schedule = self._in_turn(ordered, cell, now)
        label, own, num_free = submit.tenant.label, num_own, limit - len(ordered)
        after_s = schedule.start_s
        for request, start_s in zip(ordered, schedule.starts_s, strict=True):
            num_free += 1
            own -= request.submit.tenant.label == label and self._is_held_against(request, submit, cell)
            if self._has_place(own, num_free):
                after_s = start_s
                break
        retry_after_s = self._promise(after_s, submit, cell, now)
        return Rejected(
            request_id=submit.request_id,
            code="queue_full",
            message=f"{_counted(num_own, ' of this API key')} already waiting, its part of {limit} places "
            f"of which {limit - len(ordered)} are kept for other keys; try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    def _promise(
        self, after_s: float, submit: Submit, cell: Cell, now: float, *, may_be_near: bool = False
    ) -> float:
        """When to come back, not before a time; an appointment, but for who asks again until it is taken."""
        left_s = self.outages.left_s(now)
        stretched_s = left_s + self._stretch * max(0.0, after_s - left_s)
        if submit.was_taken:
            return min(self.promises.max_after_s, max(1.0, math.ceil(stretched_s)))
        return self.promises.make(
            self._as_promised(submit),
            stretched_s,
            self.forecast.work_s(submit, drafts=bool(cell.pool.drafters)),
            now,
            may_be_near=may_be_near,
            scarcity=self.headroom.scarcity(now),
        )

    def _as_promised(self, submit: Submit) -> Submit:
        """The request when it comes as it was told: one with objectives is as urgent as any tier's."""
        if submit.objective == Objective():
            return submit
        urgent = min((tier.priority for tier in self.config.tiers.values()), default=0)
        return msgspec.structs.replace(submit, priority=min(submit.priority, urgent, 0))


def _counted(number: int, whose: str = "") -> str:
    return f"1 request{whose} is" if number == 1 else f"{number} requests{whose} are"
