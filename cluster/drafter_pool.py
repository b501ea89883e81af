"""The drafters of a cell as the scheduler sees them: who is there, how busy, and who serves whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cluster import pool_views
from cluster.config import SelectorConfig
from cluster.cost_model import CostModel
from cluster.draft_items import draft_items, has_read
from cluster.drafter_state import READ, DrafterState, OutstandingDraft
from cluster.exploring import Explorer
from cluster.pool_views import MeasuredCosts
from cluster.requests import Request, State
from cluster.switching import Switching
from drafters.messages import DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.protocol import Capabilities
from engine.stop_rules import StopRule
from engine.tree_batch import TreeBatch
from selector.acceptance import AcceptanceEstimates
from selector.protocol import Outcome, PoolView, RequestView, Selector
from selector.registry import make_selector

# A request in these states is drafted for, or its tree is verified: its drafter is accounted for that.
WITH_TREE = (State.DRAFTING, State.DRAFTED, State.VERIFYING)
# What is expected of a drafter that has no model of the text, such as prompt lookup, before it is observed:
# its rate, how sure that is, and how much it varies between requests of one kind.
UNMODELLED = (0.3, 0.3, 0.05)


@dataclass(slots=True)
class DrafterPool:
    """Keeps who serves whom as its selector says, and builds the drafters' calls.

    Instances are called, and hold requests; what is learnt is learnt of their kind.

    Attributes:
        cost: forward times; told of every instance's kind.
        max_depth: deepest draft of the policy.
        config: which selector, and its parameters.
        acceptance: rates of kinds on requests, for policies and selectors alike; fed here.
        selector: says which drafter serves which request.
        drafters: by name of the instance.
        switching: prepares switches and counts them.
        explorer: has drafters scored on requests that they do not serve.
    """

    cost: CostModel
    max_depth: int
    config: SelectorConfig = field(default_factory=SelectorConfig)
    acceptance: AcceptanceEstimates = field(default_factory=AcceptanceEstimates)
    drafters: dict[str, DrafterState] = field(default_factory=dict)
    selector: Selector = field(init=False)
    costs: MeasuredCosts = field(init=False)
    switching: Switching = field(init=False)
    explorer: Explorer = field(init=False)
    _next_call: int = 0
    _begun: set[str] = field(default_factory=set)
    # Instances that may be assigned, and the length up to which all of them can follow a request.
    _assignable: tuple[str, ...] = ()
    _shortest: int = 0

    def __post_init__(self) -> None:
        config = self.config
        self.selector = make_selector(
            config.name,
            estimates=self.acceptance,
            drafters=config.drafters,
            alpha=config.alpha,
            beta=config.beta,
            switching_weight=config.switch_cost,
            epsilon=config.epsilon,
            seed=config.seed,
        )
        self.costs = MeasuredCosts(self.cost)
        self.switching = Switching(self)
        self.explorer = Explorer(self)

    # Drafters come and go

    def add(
        self, name: str, capabilities: Capabilities, max_requests: int, kind: str = "", size: int = 0
    ) -> None:
        """A drafter is ready, and knows nothing; `kind` and `size` as of `DrafterReady`."""
        kind = kind or name
        drafter = DrafterState(name, capabilities, max_requests, kind, size or capabilities.num_parameters)
        self.drafters[name] = drafter
        self.cost.kinds.pop(name, None)
        if kind != name:
            self.cost.kinds[name] = kind
        self.costs.keeping.discard(kind)  # another may have had the name before
        if capabilities.needs_prefill:
            self.costs.keeping.add(kind)
        if not capabilities.has_probabilities:
            self.acceptance.expect(kind, *UNMODELLED)
        self._count_assignable()

    def drain(self, name: str, requests: Iterable[Request]) -> None:
        """A drafter takes no new requests; those it drafts for now leave it when they are next assigned."""
        drafter = self.drafters.get(name)
        if drafter is None:
            return
        drafter.is_draining = True
        self._count_assignable()
        self.leave_draining(request for request in requests if request.state not in WITH_TREE)

    def leave_draining(self, requests: Iterable[Request]) -> None:
        """Requests leave drafters that are draining, or late."""
        for request in requests:
            current = self.drafters.get(request.drafter)
            if current is not None and (current.is_draining or current.is_late):
                self.leave(request)

    def leave_behind(self, name: str) -> None:
        """A drafter's answer was not waited for: until it answers, requests do better without it."""
        self.drafters[name].is_late = True
        self._count_assignable()

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

    def lose(self, name: str, requests: Iterable[Request]) -> list[Request]:
        """A drafter is gone; those that it served, which are without one until they are assigned."""
        self.drafters.pop(name, None)
        self._count_assignable()
        self.explorer.lost(name)
        self.switching.lost(name)
        orphans = []
        for request in requests:
            request.heard.pop(name, None)
            if request.drafter == name:
                request.drafter = ""
                orphans.append(request)
        return orphans

    @property
    def is_waiting(self) -> bool:
        """Whether any drafter still owes an answer."""
        return any(drafter.outstanding for drafter in self.drafters.values())

    def take_over(self, before: DrafterPool) -> None:
        """Go on with the drafters of another pool, which is idle; what was learnt of them here stays."""
        for name in self.drafters.keys() - before.drafters.keys():
            self.lose(name, ())
        for name, drafter in before.drafters.items():
            mine = self.drafters.get(name)
            # One of the same name may have taken its place since, and be able to do less.
            if mine is None or not mine.can_the_same(drafter):
                if mine is not None:
                    self.lose(name, ())
                self.add(name, drafter.capabilities, drafter.max_requests, drafter.kind, drafter.size)
                mine = self.drafters[name]
            mine.release = list(drafter.release)
            mine.is_draining, mine.is_drained = drafter.is_draining, drafter.is_drained
        self._count_assignable()
        self._next_call = before._next_call

    @property
    def num_switches(self) -> int:
        """Requests that left a drafter for another one or none."""
        return self.switching.totals.switches

    def _count_assignable(self) -> None:
        usable = [d for d in self.drafters.values() if not (d.is_draining or d.is_late)]
        self._assignable = tuple(drafter.name for drafter in usable)
        self._shortest = min((drafter.capabilities.max_tokens for drafter in usable), default=0)

    # Who serves whom

    def allowed(self, request: Request) -> tuple[str, ...]:
        """Instances the request may use at its present length, by name or kind as it wishes."""
        wish = request.submit.speculation
        if wish.mode == "off":
            return ()
        if not wish.drafters and request.num_tokens < self._shortest:
            return self._assignable
        return tuple(
            name
            for name in self._assignable
            if (not wish.drafters or name in wish.drafters or self.drafters[name].kind in wish.drafters)
            and request.num_tokens < self.drafters[name].capabilities.max_tokens
        )

    def request_view(self, request: Request) -> RequestView:
        """The request as a selector sees it."""
        return pool_views.request_view(request, self.allowed(request))

    def pool_view(self, drafters: Iterable[DrafterState] | None = None) -> PoolView:
        """These drafters as a selector sees them; if None, all that may be assigned."""
        if drafters is None:
            drafters = (self.drafters[name] for name in self._assignable)
        return pool_views.pool_view(drafters, self.costs, self.max_depth)

    def assign(self, requests: Sequence[Request], now: float, *, is_drafting: bool = True) -> None:
        """Have the selector say who drafts for these requests: once a step those that draft next.

        Others, not `is_drafting`, are given a drafter so that it can read them.
        """
        if not requests:
            return
        if len(self._assignable) < len(self.drafters):
            self.leave_draining(requests)
        begun = self._begun
        for request in requests:
            if request.request_id not in begun:
                self.begin(request)
        anyone, shortest = self._assignable, self._shortest
        # By position, which takes half as long: one is made for each request and step.
        views = [
            RequestView(
                request.request_id,
                request.drafter,
                anyone
                if request.is_unrestricted and request.num_tokens < shortest
                else self.allowed(request),
                request.num_prompt,
                request.num_tokens,
                request.num_remaining,
                request.num_steps,
                is_drafting,
            )
            for request in requests
        ]
        chosen = self.selector.assign(views, self.pool_view())
        moving = []
        for request, view in zip(requests, views, strict=True):
            name = chosen.get(request.request_id, "")
            if name not in view.allowed:
                name = ""
            if name != request.drafter:
                moving.append((request, request.drafter, name))
                self.leave(request)
        # All have left before the first enters, so that two may change places.
        for request, before, name in moving:
            drafter = self.drafters.get(name)
            if drafter is not None and len(drafter.served) < drafter.max_requests:
                request.drafter = name
                drafter.served.add(request.request_id)
            self.switching.moved(request, before, now)

    def begin(self, request: Request) -> None:
        """Tell selector and estimates of a request, once."""
        if request.request_id in self._begun:
            return
        self._begun.add(request.request_id)
        tier = request.submit.tier
        labels = () if tier == "default" else (tier,)
        self.acceptance.begin(request.request_id, request.submit.prompt, labels)
        self.selector.begin(request.request_id, request.submit.prompt, labels)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What a verify step brought; before its requests are forgotten."""
        self.selector.observe(outcomes)

    def score(self, request_id: str, kind: str, scored: int, agreed: int) -> None:
        """Of `scored` committed tokens a drafter of this kind would have said `agreed` itself."""
        self.acceptance.observe(request_id, kind, scored, agreed)
        self.selector.score(request_id, kind, scored, agreed)

    def rate(self, request: Request) -> float:
        """Estimated acceptance rate of its drafter on the request; 0 without one."""
        drafter = self.drafters.get(request.drafter)
        return 0.0 if drafter is None else self.acceptance.rate(request.request_id, drafter.kind)

    def kind_of(self, name: str) -> str:
        """Kind of an instance, also of one that is gone; empty for none."""
        return self.cost.kinds.get(name, name)

    def forget(self, request: Request) -> None:
        """A request ended: every drafter that knows it is told with its next call."""
        self.leave(request)
        self._begun.discard(request.request_id)
        self.acceptance.forget(request.request_id)
        self.selector.forget(request.request_id)
        self.switching.forget(request.request_id)
        for drafter in self.drafters.values():
            drafter.forget(request.request_id)

    def leave(self, request: Request) -> None:
        """The request is without a drafter until it is assigned one; what drafters have heard they keep."""
        drafter = self.drafters.get(request.drafter)
        if drafter is not None:
            drafter.served.discard(request.request_id)
        request.drafter = ""

    # Calls

    def item(self, request: Request, plan: DraftPlan) -> DraftItem:
        """The request's part of a call to its drafter."""
        return self.item_for(request, self.drafters[request.drafter], plan)

    def item_for(self, request: Request, drafter: DrafterState, plan: DraftPlan = READ) -> DraftItem:
        """The request's part of a call to any drafter, which has then heard of all its tokens."""
        return draft_items(drafter, [request], [plan])[0]

    def call(
        self,
        name: str,
        items: list[DraftItem],
        now: float,
        predicted_s: float = 0.0,
        stop_rule: StopRule | None = None,
        ahead_s: float = 0.0,
        num_context: int = 0,
    ) -> DraftCall:
        """A call to one drafter, with the releases owed to it."""
        drafter = self.drafters[name]
        self._next_call += 1
        call_id = self._next_call
        drafter.outstanding[call_id] = OutstandingDraft.of(call_id, items, now, predicted_s, num_context)
        release, drafter.release = drafter.release, []
        return DraftCall(call_id=call_id, items=items, release=release, stop_rule=stop_rule, ahead_s=ahead_s)

    def can_draft_now(self, request: Request) -> bool:
        """Whether its drafter has read nearly all of the request and reads no other: nobody has to wait."""
        return has_read(self.drafters[request.drafter])(request)

    def outstanding(self, name: str, call_id: int) -> OutstandingDraft | None:
        """The call, if it is not answered."""
        drafter = self.drafters.get(name)
        return None if drafter is None else drafter.outstanding.get(call_id)

    def answered(
        self, name: str, result: DraftResult, now: float, trees: TreeBatch | None = None
    ) -> OutstandingDraft | None:
        """Take an answer in: scores feed the estimates. None if the call is not known (any more).

        `trees` are those of its drafts.
        """
        drafter = self.drafters.get(name)
        if drafter is None:
            return None
        outstanding = drafter.outstanding.pop(result.call_id, None)
        if drafter.is_late:
            drafter.is_late = False
            self._count_assignable()
        if outstanding is not None:
            if drafter.reading:
                drafter.reading.difference_update(outstanding.request_ids)
            self._weigh(name, outstanding, trees or TreeBatch([draft.tree for draft in result.drafts]))
            if outstanding.depth == 0 and len(outstanding.request_ids) == 1 and not result.unknown:
                self.costs.have_read(drafter.kind, outstanding.num_read, result.seconds)
        kind, observe = drafter.kind, self.acceptance.observe
        score = self.selector.score if self.selector.learns_from_scores else None
        # Who drafts by a model scores what was committed last. Who does neither cannot follow it (too long
        # in its own tokens, tokens it lacks, no slots), and it should go where it can be followed.
        must_draft = outstanding is not None and outstanding.depth > 0 and drafter.capabilities.needs_prefill
        can_move = must_draft and len(self._assignable) > 1
        for draft in result.drafts:
            # Judged by what it would have said at every committed token. What verification accepts says
            # less: only tokens the drafter was sure of are verified, so of those nearly all are accepted.
            num_scored = draft.num_scored or int(can_move and draft.tree.num_drafted == 0)
            if num_scored:
                observe(draft.request_id, kind, num_scored, draft.num_agreed)
                if score is not None:
                    score(draft.request_id, kind, num_scored, draft.num_agreed)
        self.explorer.answered(name, result)
        self.switching.answered(name, result, now)
        for request_id in result.unknown:
            drafter.forget(request_id)  # where the call failed, it holds the request all the same
        return outstanding

    def _weigh(self, name: str, outstanding: OutstandingDraft, trees: TreeBatch) -> None:
        """Layers that the call came to: drafts ended early must not make their drafter look fast."""
        if outstanding.predicted_s <= 0.0:
            return
        depth = outstanding.depth
        if not self.drafters[name].capabilities.num_candidates:  # heads were evaluated before anybody drafted
            depth = min(depth, trees.deepest if trees else 0)
        n, width = len(outstanding.request_ids), outstanding.width
        outstanding.layers_s = self.cost.layers_seconds(name, n, width, depth, outstanding.num_context)
