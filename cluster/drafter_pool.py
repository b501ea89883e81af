"""The drafters of a cell as the scheduler sees them: who is there, how busy, and who serves whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cluster.cost_model import CostModel
from cluster.drafter_state import DrafterState, OutstandingDraft
from cluster.requests import Request, State
from drafters.messages import DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.protocol import Capabilities
from drafters.stop_rules import StopRule
from selector.acceptance import AcceptanceEstimates
from selector.greedy import HYSTERESIS, Candidate, choose, goodput, most_promising

# A request's drafter is reconsidered every so many verify steps.
RECONSIDER_STEPS = 6
# Other drafters may be scored on a running request once it has this many output tokens, every so many steps,
# while it may still get that many more.
EXPLORE_TOKENS = 8
EXPLORE_STEPS = 4
# An upper bound lies this many standard deviations above the estimate: on a running request, where only a
# switch would pay, and on a finished one, from which all later ones like it may profit.
RUNNING_OPTIMISM = 1.0
FINISHED_OPTIMISM = 2.0
# Of the finished requests at first each may be read by another drafter; after every so many readings a larger
# interval is left between them, until it is this many requests. While there is no idle time it always is.
EXPLORE_STAGE = 24
EXPLORE_INTERVAL = 8
# A request in these states is drafted for, or its tree is verified: its drafter is accounted for that.
WITH_TREE = (State.DRAFTING, State.DRAFTED, State.VERIFYING)
# A drafter that has more to read than this reads first, while the request is decoded without it.
READ_WITH_DRAFT = 16
# What is expected of a drafter that has no model of the text, such as prompt lookup, before it is observed:
# its rate, how sure that is, and how much it varies between requests of one kind.
UNMODELLED = (0.3, 0.3, 0.05)


@dataclass(slots=True)
class DrafterPool:
    """Assigns requests to drafters by greedy estimated goodput and builds their calls."""

    cost: CostModel
    max_depth: int
    acceptance: AcceptanceEstimates = field(default_factory=AcceptanceEstimates)
    drafters: dict[str, DrafterState] = field(default_factory=dict)
    num_switches: int = 0
    num_explorations: int = 0
    _next_call: int = 0
    _exploring: tuple[str, int] | None = None
    _num_read: int = 0
    _since_read: int = 0

    def add(
        self, name: str, capabilities: Capabilities, max_requests: int, kind: str = "", size: int = 0
    ) -> None:
        """A drafter is ready, and knows nothing; `kind` and `size` as of `DrafterReady`."""
        size = size or capabilities.num_parameters
        self.drafters[name] = DrafterState(name, capabilities, max_requests, kind or name, size)
        if not self.acceptance.is_known(name):
            self._num_read = 0
        if not capabilities.has_probabilities:
            self.acceptance.expect(name, *UNMODELLED)

    @property
    def is_waiting(self) -> bool:
        """Whether any drafter still owes an answer."""
        return any(drafter.outstanding for drafter in self.drafters.values())

    def take_over(self, before: DrafterPool) -> None:
        """Go on with the drafters of another pool, which is idle; what was learnt of them here stays."""
        for name in self.drafters.keys() - before.drafters.keys():
            del self.drafters[name]
        for name, drafter in before.drafters.items():
            if name not in self.drafters:
                self.add(name, drafter.capabilities, drafter.max_requests, drafter.kind, drafter.size)
            self.drafters[name].is_draining = drafter.is_draining
            self.drafters[name].is_drained = drafter.is_drained
            self.drafters[name].release = list(drafter.release)
        self._next_call = before._next_call

    def lose(self, name: str, requests: Iterator[Request]) -> None:
        """A drafter is gone; its requests are without a drafter until the next assignment."""
        self.drafters.pop(name, None)
        if self._exploring is not None and self._exploring[0] == name:
            self._exploring = None
        for request in requests:
            request.heard.pop(name, None)
            if request.drafter == name:
                request.drafter = ""

    def drain(self, name: str, requests: Iterable[Request]) -> None:
        """A drafter takes no new requests; those it drafts for now leave it when they are next assigned."""
        drafter = self.drafters.get(name)
        if drafter is None:
            return
        drafter.is_draining = True
        for request in requests:
            if request.drafter == name and request.state not in WITH_TREE:
                self._unassign(request)
                request.drafter = ""

    def leave_draining(self, ready: Iterable[Request]) -> None:
        """Requests about to draft leave drafters that are draining."""
        for request in ready:
            current = self.drafters.get(request.drafter)
            if current is not None and current.is_draining:
                self._unassign(request)
                request.drafter = ""

    def take_drained(self) -> list[str]:
        """Draining drafters that serve nobody and owe nothing any more; each is named once."""
        drained = [
            drafter
            for drafter in self.drafters.values()
            if drafter.is_draining and not (drafter.is_drained or drafter.served or drafter.outstanding)
        ]
        for drafter in drained:
            drafter.is_drained = True
        return [drafter.name for drafter in drained]

    def allowed(self, request: Request) -> list[DrafterState]:
        """Drafters the request may use at its present length."""
        wish = request.submit.speculation
        if wish.mode == "off":
            return []
        return [
            drafter
            for name, drafter in self.drafters.items()
            if not drafter.is_draining
            and (not wish.drafters or name in wish.drafters or drafter.kind in wish.drafters)
            and request.num_tokens < drafter.capabilities.max_tokens
        ]

    def assign(self, request: Request) -> None:
        """Give the request the drafter that promises it the highest goodput; none if none has room."""
        tier = request.submit.tier
        self.acceptance.begin(request.request_id, request.submit.prompt, () if tier == "default" else (tier,))
        candidates = [self._candidate(request, drafter) for drafter in self.allowed(request)]
        chosen = choose(candidates, request.drafter, *self._step(request))
        if chosen == request.drafter:
            return
        if request.drafter:
            self.num_switches += 1
        self._unassign(request)
        request.drafter = chosen
        if chosen:
            self.drafters[chosen].served.add(request.request_id)

    def is_due(self, request: Request) -> bool:
        """Whether the request's drafter should be (re)considered before this step."""
        current = self.drafters.get(request.drafter)
        if current is None or current.is_draining:
            return True
        return request.num_steps % RECONSIDER_STEPS == RECONSIDER_STEPS - 1

    def item(self, request: Request, plan: DraftPlan) -> DraftItem:
        """The request's part of a call to its drafter; the drafter has then heard of all its tokens."""
        return self._item(request, self.drafters[request.drafter], plan)

    def call(
        self,
        name: str,
        items: list[DraftItem],
        now: float,
        predicted_s: float = 0.0,
        stop_rule: StopRule | None = None,
        ahead: bool = False,
    ) -> DraftCall:
        """A call to one drafter, with the releases owed to it."""
        drafter = self.drafters[name]
        self._next_call += 1
        ids = tuple(item.request_id for item in items)
        depth = max(item.plan.depth for item in items)
        width = max(item.plan.width for item in items)
        drafter.outstanding[self._next_call] = OutstandingDraft(
            self._next_call, now, predicted_s, ids, depth, width
        )
        release, drafter.release = drafter.release, []
        return DraftCall(
            call_id=self._next_call, items=items, release=release, stop_rule=stop_rule, ahead=ahead
        )

    def prefetch(self, request: Request, now: float) -> DraftCall | None:
        """Let the request's drafter read what it has not heard; None if it is reading, or keeps nothing."""
        drafter = self.drafters[request.drafter]
        if not drafter.capabilities.needs_prefill or request.request_id in drafter.reading:
            return None
        drafter.reading.add(request.request_id)
        return self.call(drafter.name, [self.item(request, DraftPlan(depth=0))], now)

    def can_draft_now(self, request: Request) -> bool:
        """Whether its drafter has read nearly all of the request and reads no other: nobody has to wait."""
        drafter = self.drafters[request.drafter]
        if not drafter.capabilities.needs_prefill:
            return True
        if any(call.depth == 0 for call in drafter.outstanding.values()):
            return False
        if request.request_id in drafter.reading or request.request_id not in drafter.known:
            return False
        return request.num_tokens - request.heard.get(drafter.name, 0) <= READ_WITH_DRAFT

    def explorations(self, request: Request, now: float) -> list[tuple[str, DraftCall]]:
        """A prefetch call that lets one idle drafter be scored on what a running request has said so far.

        Only one that could be worth a switch is asked, and one at a time: it must read the whole sequence,
        which on few cores slows down everybody else.
        """
        if len(request.output) != EXPLORE_TOKENS and request.num_steps % EXPLORE_STEPS:
            return []
        if len(request.output) < EXPLORE_TOKENS or request.num_remaining < EXPLORE_TOKENS:
            return []
        if not request.drafter:
            return []
        here = self._candidate(request, self.drafters[request.drafter])
        to_beat = HYSTERESIS * goodput(here, *self._step(request))
        rivals = []
        for drafter in self._explorable(request):
            spread = self.acceptance.uncertainty(request.request_id, drafter.name)
            rivals.append(self._candidate(request, drafter, RUNNING_OPTIMISM * spread))
        chosen = most_promising(rivals, to_beat, *self._step(request))
        if not chosen:
            return []
        item = self._item(request, self.drafters[chosen], DraftPlan(depth=0))
        return [(chosen, self._explore(chosen, item, now))]

    def final_explorations(
        self, request: Request, now: float, *, is_busy: bool = False
    ) -> list[tuple[str, DraftCall]]:
        """A prefetch call that lets one idle drafter be scored on a request that ends; before `forget`.

        The request has nothing of it, the next ones with such a prompt may: asked is whoever could be a
        better choice for them than the one that seems best. The drafter releases it with its next call.
        `is_busy` says that there is no idle time to do it in.
        """
        if not request.num_steps:
            return []
        self._since_read += 1
        interval = min(EXPLORE_INTERVAL, 1 + self._num_read // EXPLORE_STAGE)
        if self._since_read < (EXPLORE_INTERVAL if is_busy else interval):
            return []
        to_beat, rivals = 0.0, []
        explorable = {drafter.name for drafter in self._explorable(request)}
        for drafter in self.allowed(request):
            rate, spread = self.acceptance.prior(request.request_id, drafter.name)
            known = self._candidate(request, drafter, rate=rate)
            to_beat = max(to_beat, goodput(known, *self._step(request)))
            if drafter.name in explorable:
                rivals.append(self._candidate(request, drafter, FINISHED_OPTIMISM * spread, rate))
        chosen = most_promising(rivals, to_beat, *self._step(request))
        if not chosen:
            return []
        self._num_read += 1
        self._since_read = 0
        call = self._explore(chosen, _opening(request, DraftPlan(depth=0)), now)
        self.drafters[chosen].release.append(request.request_id)
        return [(chosen, call)]

    def _explorable(self, request: Request) -> list[DrafterState]:
        """Drafters that are idle, have room, and have not been scored on the request."""
        if self._exploring is not None:
            return []
        return [
            drafter
            for drafter in self.allowed(request)
            if not drafter.outstanding
            and request.request_id not in drafter.known
            and len(drafter.known) < drafter.max_requests
            and not self.acceptance.evidence(request.request_id, drafter.name)
        ]

    def _explore(self, name: str, item: DraftItem, now: float) -> DraftCall:
        call = self.call(name, [item], now)
        self._exploring = (name, call.call_id)
        self.num_explorations += 1
        return call

    def _step(self, request: Request) -> tuple[float, float, int]:
        """Seconds of a verify step without drafts, those of each further token, and the deepest draft."""
        verify_s = self.cost.verify_seconds(1, 1, request.num_tokens)
        return verify_s, self.cost.verify_token_seconds(request.num_tokens), self.max_depth

    def _candidate(
        self, request: Request, drafter: DrafterState, optimism: float = 0.0, rate: float | None = None
    ) -> Candidate:
        if rate is None:
            rate = self.acceptance.rate(request.request_id, drafter.name)
        return Candidate(
            name=drafter.name,
            rate=min(max(rate + optimism, 0.0), 1.0),
            draft_s=self.cost.draft_seconds(drafter.name, 1, 1, 1, request.num_tokens),
            load=len(drafter.served),
            capacity=drafter.max_requests,
        )

    def answered(self, name: str, result: DraftResult) -> OutstandingDraft | None:
        """Take an answer in: scores feed the estimates. None if the call is not known (any more)."""
        drafter = self.drafters.get(name)
        if drafter is None:
            return None
        outstanding = drafter.outstanding.pop(result.call_id, None)
        if outstanding is not None:
            drafter.reading.difference_update(outstanding.request_ids)
            self._correct_prediction(name, outstanding, result)
        for draft in result.drafts:
            # Judged by what it would have said at every committed token. What verification accepts says
            # less: only tokens the drafter was sure of are verified, so of those nearly all are accepted.
            self.acceptance.observe(draft.request_id, name, draft.num_scored, draft.num_agreed)
        if self._exploring == (name, result.call_id):
            self._exploring = None
            if outstanding is not None and not any(draft.num_scored for draft in result.drafts):
                # Who cannot follow a request could not have drafted for it.
                self.acceptance.observe(outstanding.request_ids[0], name, 1, 0)
        for request_id in result.unknown:
            drafter.known.discard(request_id)
        return outstanding

    def _correct_prediction(self, name: str, outstanding: OutstandingDraft, result: DraftResult) -> None:
        """Drafts that a stop rule ended early must not make their drafter look fast."""
        depth = max((int(draft.tree.depth.max()) for draft in result.drafts), default=0)
        if outstanding.predicted_s > 0.0 and depth < outstanding.depth:
            n, width = len(outstanding.request_ids), outstanding.width
            planned_s = self.cost.draft_seconds(name, n, width, outstanding.depth)
            outstanding.predicted_s *= self.cost.draft_seconds(name, n, width, depth) / planned_s

    def forget(self, request: Request) -> None:
        """A request ended: every drafter that knows it is told with its next call."""
        self._unassign(request)
        request.drafter = ""
        self.acceptance.forget(request.request_id)
        for drafter in self.drafters.values():
            drafter.reading.discard(request.request_id)
            if request.request_id in drafter.known:
                drafter.known.discard(request.request_id)
                drafter.release.append(request.request_id)

    def _item(self, request: Request, drafter: DrafterState, plan: DraftPlan) -> DraftItem:
        start = request.heard.get(drafter.name, 0)
        if request.request_id not in drafter.known:
            start = 0
        tokens = request.tokens_from(start) if start else []
        request.heard[drafter.name] = request.num_tokens
        drafter.known.add(request.request_id)
        if start == 0:
            return _opening(request, plan)
        return DraftItem(
            request_id=request.request_id, start=start, tokens=np.array(tokens, dtype=np.int32), plan=plan
        )

    def _unassign(self, request: Request) -> None:
        state = self.drafters.get(request.drafter)
        if state is not None:
            state.served.discard(request.request_id)


def _opening(request: Request, plan: DraftPlan) -> DraftItem:
    """The item that opens the request on a drafter as it stands."""
    return DraftItem(
        request_id=request.request_id,
        start=0,
        tokens=np.zeros(0, dtype=np.int32),
        plan=plan,
        spec=request.spec(),
    )
