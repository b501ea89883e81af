"""Fast switching (SPIN section IV-C): the next drafter's cache is built in idle time, before the switch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.requests import Request
from drafters.messages import DraftCall, DraftResult
from selector.protocol import MovesOnSchedule

if TYPE_CHECKING:
    from cluster.drafter_pool import DrafterPool

# A drafter that has more to read than this reads first, while the request is decoded without it; with less it
# drafts at once.
READ_WITH_DRAFT = 16
# What is prepared is brought up to date when more than this is unread: with one step's tokens on top its
# drafter may still draft at once.
READ_AGAIN = 6
# A request that may get fewer tokens than this is not prepared for another drafter.
LEAST_REMAINING = 16
# A request that its selector would leave where it is is asked about again after so many steps; at once if the
# selector moves requests on a schedule, where a step left out is a move missed.
ASK_AGAIN_STEPS = 8
# Below this share of right guesses among the recent ones, one request in so many is prepared for.
LEAST_HITS = 0.2
PROBE_REQUESTS = 8
# Weight of the newest guess in that share.
SMOOTHING = 0.05


@dataclass(slots=True)
class Preparation:
    """A cache built ahead.

    Attributes:
        drafter: the instance.
        seconds: that building it took, so far.
    """

    drafter: str
    seconds: float = 0.0


@dataclass(slots=True)
class Wait:
    """A request that switched and has no draft of its new drafter yet.

    Attributes:
        drafter: the new one.
        since: the switch.
        is_prepared: whether the drafter had hardly anything to read.
        built_s: seconds of reading that were done ahead.
    """

    drafter: str
    since: float
    is_prepared: bool
    built_s: float


@dataclass(slots=True)
class SwitchTotals:
    """Counters since the start.

    Attributes:
        switches: requests that left a drafter for another one or none.
        prepared: switches to a drafter that kept a cache and had hardly anything to read.
        wasted: preparations of which nothing came.
        avoided_s: seconds of reading that requests would have waited for, had it not been done ahead.
        first_drafts: switches after which the new drafter drafted, by whether they were prepared.
        wait_s: seconds from those switches to the first draft.
    """

    switches: int = 0
    prepared: int = 0
    wasted: int = 0
    avoided_s: float = 0.0
    first_drafts: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    wait_s: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})


@dataclass(slots=True)
class Switching:
    """Prepares switches of a pool and keeps the accounts of all its switches.

    Attributes:
        pool: whose.
        most_at_once: preparations under way: while the target computes, more would take its cores.
        totals: the accounts.
    """

    pool: DrafterPool
    most_at_once: int = 1
    totals: SwitchTotals = field(default_factory=SwitchTotals)
    _hits: float = 1.0
    _prepared: dict[str, Preparation] = field(default_factory=dict)
    _calls: dict[tuple[str, int], str] = field(default_factory=dict)
    _waits: dict[str, Wait] = field(default_factory=dict)
    _ask_at: dict[str, int] = field(default_factory=dict)

    def prepare(self, requests: Iterable[Request], now: float, idle_s: float) -> list[tuple[str, DraftCall]]:
        """Calls that build caches where the selector would move these requests next, at idle drafters.

        One call per drafter at a time. A drafter that serves others is left alone if it would be reading
        longer than it is expected to be idle, as they would have to wait.

        Args:
            requests: in the verify call that has just been sent, so that their drafters are idle.
            now: the scheduler's clock.
            idle_s: seconds that the verify call will take.
        """
        calls = []
        view = None
        for request in requests:
            if len(self._calls) >= self.most_at_once:
                break
            if request.num_remaining < LEAST_REMAINING:
                continue
            if self._hits < LEAST_HITS and request.order % PROBE_REQUESTS:
                continue
            if request.num_steps < self._ask_at.get(request.request_id, 0):
                continue
            mine = self.pool.request_view(request)
            if mine.allowed in ((), (request.drafter,)):  # nowhere to go, as with a single drafter
                self._ask_at[request.request_id] = request.num_steps + ASK_AGAIN_STEPS
                continue
            view = view or self.pool.pool_view()
            name = self.pool.selector.destination(mine, view)
            if name not in mine.allowed or name == request.drafter:
                if not isinstance(self.pool.selector, MovesOnSchedule):
                    self._ask_at[request.request_id] = request.num_steps + ASK_AGAIN_STEPS
                continue
            call = self._prepare(request, name, now, idle_s)
            if call is not None:
                calls.append((name, call))
        return calls

    def _prepare(self, request: Request, name: str, now: float, idle_s: float) -> DraftCall | None:
        drafter = self.pool.drafters[name]
        before = self._prepared.get(request.request_id)
        if before is not None and before.drafter != name:
            self._waste(request.request_id)
        if not drafter.capabilities.needs_prefill or drafter.outstanding:
            return None
        is_known = request.request_id in drafter.known
        unread = drafter.num_unread(request)
        if unread <= READ_AGAIN or (not is_known and len(drafter.known) >= drafter.max_requests):
            return None
        if drafter.served and self.pool.costs.rebuild_s(drafter.kind, unread) > idle_s:
            return None
        self._prepared.setdefault(request.request_id, Preparation(name))
        drafter.reading.add(request.request_id)
        call = self.pool.call(name, [self.pool.item_for(request, drafter)], now)
        self._calls[name, call.call_id] = request.request_id
        return call

    def moved(self, request: Request, before: str, now: float) -> None:
        """The request has left the drafter `before`, or none, for its present one, or none."""
        self.totals.switches += bool(before)
        self._waits.pop(request.request_id, None)
        preparation = self._prepared.get(request.request_id)
        if preparation is not None:
            if preparation.drafter == request.drafter:
                del self._prepared[request.request_id]
                self._resolve(was_right=True)
            else:
                self._waste(request.request_id)
                preparation = None
        drafter = self.pool.drafters.get(request.drafter)
        if drafter is None or not drafter.capabilities.needs_prefill or not (before or preparation):
            return
        is_prepared = self.pool.can_draft_now(request)
        self.totals.prepared += is_prepared
        built_s = 0.0 if preparation is None else preparation.seconds
        self._waits[request.request_id] = Wait(drafter.name, now, is_prepared, built_s)

    def answered(self, name: str, result: DraftResult, now: float) -> None:
        """A drafter answered: what was prepared is there, or somebody has the first draft after a switch."""
        request_id = self._calls.pop((name, result.call_id), None)
        if request_id is not None:
            preparation = self._prepared.get(request_id)
            if preparation is not None and preparation.drafter == name:
                preparation.seconds += result.seconds
                if request_id in result.unknown:
                    self._waste(request_id)
        for draft in result.drafts if self._waits else ():
            wait = self._waits.get(draft.request_id)
            if wait is None or wait.drafter != name or draft.tree.num_drafted == 0:
                continue
            del self._waits[draft.request_id]
            self.totals.first_drafts[wait.is_prepared] += 1
            self.totals.wait_s[wait.is_prepared] += now - wait.since
            if wait.is_prepared:
                self.totals.avoided_s += wait.built_s

    def lost(self, name: str) -> None:
        """A drafter is gone with what it had prepared."""
        for request_id in [i for i, one in self._prepared.items() if one.drafter == name]:
            del self._prepared[request_id]
            self.totals.wasted += 1  # no wrong guess
        for request_id in [i for i, wait in self._waits.items() if wait.drafter == name]:
            del self._waits[request_id]
        for call in [call for call in self._calls if call[0] == name]:
            del self._calls[call]

    def forget(self, request_id: str) -> None:
        """The request ended; the pool releases whatever drafters know of it."""
        self._waits.pop(request_id, None)
        self._ask_at.pop(request_id, None)
        if self._prepared.pop(request_id, None) is not None:
            self._resolve(was_right=False)

    def _waste(self, request_id: str) -> None:
        """The guess was wrong: the drafter forgets the request with its next call."""
        preparation = self._prepared.pop(request_id)
        self._resolve(was_right=False)
        drafter = self.pool.drafters.get(preparation.drafter)
        if drafter is not None and request_id not in drafter.served:
            drafter.forget(request_id)

    def _resolve(self, *, was_right: bool) -> None:
        self.totals.wasted += not was_right
        self._hits += SMOOTHING * (was_right - self._hits)
