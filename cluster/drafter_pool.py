"""The drafters of a cell as the scheduler sees them: who is there, how busy, and who serves whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cluster.cost_model import CostModel
from cluster.requests import Request
from drafters.messages import DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.protocol import Capabilities
from drafters.stop_rules import StopRule
from selector.acceptance import AcceptanceEstimates
from selector.greedy import Candidate, choose, goodput

# A request's drafter is reconsidered every so many verify steps.
RECONSIDER_STEPS = 6
# Other drafters may be scored on a request once it has this many output tokens, and every so many steps,
# if they could be this much better than what is known of them.
EXPLORE_TOKENS = 8
EXPLORE_STEPS = 4
OPTIMISM = 0.05
# A drafter that has more to read than this reads first, while the request is decoded without it.
READ_WITH_DRAFT = 16
# What is expected of a drafter that has no model of the text, such as prompt lookup, before it is observed.
UNMODELLED_RATE = 0.3


@dataclass(slots=True)
class OutstandingDraft:
    """A draft call sent and not answered.

    Attributes:
        call_id: of the call.
        sent_at: when.
        predicted_s: what the cost model expects of it; once answered, of the depth that it came to.
        request_ids: who is drafted for.
        depth, width: of its largest plans.
    """

    call_id: int
    sent_at: float
    predicted_s: float
    request_ids: tuple[str, ...]
    depth: int
    width: int


@dataclass(slots=True)
class DrafterState:
    """One drafter: what it can do, whom it serves, what it was asked."""

    name: str
    capabilities: Capabilities
    max_requests: int
    served: set[str] = field(default_factory=set)
    outstanding: dict[int, OutstandingDraft] = field(default_factory=dict)
    release: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    reading: set[str] = field(default_factory=set)


@dataclass(slots=True)
class DrafterPool:
    """Assigns requests to drafters by greedy estimated goodput and builds their calls."""

    cost: CostModel
    max_depth: int
    acceptance: AcceptanceEstimates = field(default_factory=AcceptanceEstimates)
    drafters: dict[str, DrafterState] = field(default_factory=dict)
    num_switches: int = 0
    _next_call: int = 0

    def add(self, name: str, capabilities: Capabilities, max_requests: int) -> None:
        """A drafter is ready, and knows nothing."""
        self.drafters[name] = DrafterState(name, capabilities, max_requests)
        if not capabilities.has_probabilities:
            self.acceptance.expect(name, UNMODELLED_RATE)

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
                self.add(name, drafter.capabilities, drafter.max_requests)
            self.drafters[name].release = list(drafter.release)
        self._next_call = before._next_call

    def lose(self, name: str, requests: Iterator[Request]) -> None:
        """A drafter is gone; its requests are without a drafter until the next assignment."""
        self.drafters.pop(name, None)
        for request in requests:
            request.heard.pop(name, None)
            if request.drafter == name:
                request.drafter = ""

    def allowed(self, request: Request) -> list[DrafterState]:
        """Drafters the request may use at its present length."""
        wish = request.submit.speculation
        if wish.mode == "off":
            return []
        return [
            drafter
            for name, drafter in self.drafters.items()
            if (not wish.drafters or name in wish.drafters)
            and request.num_tokens < drafter.capabilities.max_tokens
        ]

    def assign(self, request: Request) -> None:
        """Give the request the drafter that promises it the highest goodput; none if none has room."""
        candidates = [self._candidate(request, drafter) for drafter in self.allowed(request)]
        verify_s = self.cost.verify_seconds(1, 1, request.num_tokens)
        chosen = choose(
            candidates, request.drafter, verify_s, self.cost.verify_token_seconds(), self.max_depth
        )
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
        return not request.drafter or request.num_steps % RECONSIDER_STEPS == RECONSIDER_STEPS - 1

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
        return DraftCall(call_id=self._next_call, items=items, release=release, stop_rule=stop_rule)

    def prefetch(self, request: Request, now: float) -> DraftCall | None:
        """Let the request's drafter read what it has not heard; None if it is reading, or keeps nothing."""
        drafter = self.drafters[request.drafter]
        if not drafter.capabilities.needs_prefill or request.request_id in drafter.reading:
            return None
        drafter.reading.add(request.request_id)
        return self.call(drafter.name, [self.item(request, DraftPlan(depth=0))], now, 0.0)

    def can_draft_now(self, request: Request) -> bool:
        """Whether its drafter has read nearly all of the request, so that nobody waits for its reading."""
        drafter = self.drafters[request.drafter]
        if not drafter.capabilities.needs_prefill:
            return True
        if request.request_id in drafter.reading or request.request_id not in drafter.known:
            return False
        return request.num_tokens - request.heard.get(drafter.name, 0) <= READ_WITH_DRAFT

    def explorations(self, request: Request, now: float) -> list[tuple[str, DraftCall]]:
        """A prefetch call that lets one idle drafter be scored on what the request has said so far.

        Only a drafter that could promise more than the present one is asked: it must read the whole
        sequence, which on few cores slows down everybody else.
        """
        if len(request.output) != EXPLORE_TOKENS and request.num_steps % EXPLORE_STEPS:
            return []
        if len(request.output) < EXPLORE_TOKENS or not request.drafter:
            return []
        verify_s = self.cost.verify_seconds(1, 1, request.num_tokens)
        token_s = self.cost.verify_token_seconds()
        here = self._candidate(request, self.drafters[request.drafter])
        best, best_value = None, goodput(here, verify_s, token_s, self.max_depth)
        for drafter in self.allowed(request):
            if drafter.outstanding or request.request_id in drafter.known:
                continue
            if len(drafter.known) >= drafter.max_requests:
                continue
            hope = self._candidate(request, drafter, OPTIMISM)
            value = goodput(hope, verify_s, token_s, self.max_depth)
            if value > best_value:
                best, best_value = drafter, value
        if best is None:
            return []
        item = self._item(request, best, DraftPlan(depth=0))
        return [(best.name, self.call(best.name, [item], now, 0.0))]

    def _candidate(self, request: Request, drafter: DrafterState, optimism: float = 0.0) -> Candidate:
        return Candidate(
            name=drafter.name,
            rate=min(1.0, self.acceptance.rate(request.request_id, drafter.name) + optimism),
            draft_s=self.cost.draft_seconds(drafter.name, 1, 1, 1),
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
            if draft.request_id in drafter.known:
                self.acceptance.observe(draft.request_id, name, draft.num_scored, draft.num_agreed)
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
        return DraftItem(
            request_id=request.request_id,
            start=start,
            tokens=np.array(tokens, dtype=np.int32),
            plan=plan,
            spec=request.spec() if start == 0 else None,
        )

    def _unassign(self, request: Request) -> None:
        state = self.drafters.get(request.drafter)
        if state is not None:
            state.served.discard(request.request_id)
