"""Steps with drafts that are planned, and sent, while the step before is at the target.

What is drafted from was proposed beside the target, by EAGLE or by decoding heads, so the target has it
first. A call sent ahead says of what shape the next trees are to be; the target grows them from its own
proposals, and here the same trees are grown from the same proposals when they come with the verdicts. So the
scheduler works while the target does, and not between two of its steps (as do vLLM with asynchronous
scheduling of speculative decoding, and SGLang's overlap scheduler with EAGLE).

The plan is made without the verdicts of the step at the target, and the policy selects nothing of such trees:
only what the plan says of where drafts end bounds them. So it is for policies that say `plans_ahead`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from cluster.config import FlotillaConfig
from cluster.drafter_state import call_depth, call_width
from cluster.outstanding_verify import OutstandingVerify
from cluster.planning import StepPlanner
from cluster.policies.decode_batch import DecodeBatch
from cluster.requests import Request
from cluster.verify_calls import VerifyCalls
from drafters.messages import DraftPlan
from engine.proposals import Proposals
from engine.proposed_growth import Layers, grown
from engine.tree import TokenTree
from verifier.messages import VerifyResult


class Grown(NamedTuple):
    """What trees of one step came to.

    Attributes:
        drafter: whose they are.
        kind: of the drafter.
        num_requests: trees.
        num_drafted: nodes, roots apart.
        predicted_s: seconds that were expected to be spent beside the target on what they are grown from.
        seconds: that were.
    """

    drafter: str
    kind: str
    num_requests: int
    num_drafted: int
    predicted_s: float
    seconds: float


class _Shape(NamedTuple):
    plan: DraftPlan
    proposals: Proposals | None


@dataclass(slots=True)
class PlannedAhead:
    """Plans the step after the one at the target, and keeps the books when that one is answered.

    Attributes:
        planner: whose policy plans.
        calls: at the target.
        config: of the cell. Ranks of one target would grow their trees each for itself, and nobody has shown
            that all of them find the same: a target of several is asked in turn.
        newest: what was grown when a call began last, and not taken yet.
    """

    planner: StepPlanner
    calls: VerifyCalls
    config: FlotillaConfig
    newest: list[Grown] = field(default_factory=list)
    _planned_for: int = -1

    @property
    def is_possible(self) -> bool:
        """Whether the policy plans ahead, and something proposes beside a target of one rank.

        A selector that learns from steps is to know what one brought before it chooses for the next.
        """
        planner, has_ranks = self.planner, self.config.target.tensor_parallel > 1
        if has_ranks or planner.pool.selector.learns_from_steps:
            return False
        return planner.heads.are_there and getattr(planner.policy, "plans_ahead", False)

    def plan(
        self, requests: Sequence[Request], now: float, max_model_tokens: int
    ) -> Mapping[str, DraftPlan] | None:
        """The trees of these requests in the step after that at the target; None if it has to wait for that.

        It has to where anybody is drafted for by others than the target's heads, and near the end of the
        longest sequence.

        Args:
            requests: in that step.
            now: the scheduler's clock.
            max_model_tokens: longest sequence served.

        Returns:
            shapes by request id; those left out are not drafted for.
        """
        planner = self.planner
        policy, heads, pool = planner.policy, planner.heads, planner.pool
        if not self.is_possible:
            return None
        # The step at the target brings as many tokens, and so does this one.
        room = max_model_tokens - 2 * (self.config.policy.deepest + 1)
        if any(request.num_tokens >= room for request in requests) or not self._are_of_heads(requests):
            return None
        step = planner.totals.steps + 1
        if planner.is_resting(len(requests), step):
            return {}  # only the step after that may be drafted for
        if self._planned_for == step:
            return None  # once, and it did not fit
        self._planned_for = step
        pool.assign(requests, now)
        if not self._are_of_heads(requests):
            return None
        batch = DecodeBatch(planner.decode_views.of_all(requests, now, max_model_tokens, has_proposals=False))
        context = replace(planner.context(len(batch)), step=step, is_ahead=True)
        plans = [
            _bounded(request, plan)
            for request, plan in zip(requests, policy.plan(batch, context), strict=True)
        ]
        heads.planned(requests, plans, is_ahead=True)
        asked = [plan.depth > 0 for view, plan in zip(batch, plans, strict=True) if view.max_draft]
        if asked:
            planner.proposing.planned(planner.num_running, sum(asked) / len(asked))
        drafting = [one for one in zip(requests, plans, strict=True) if one[1].depth > 0]
        if planner.stops_drafting is not None:
            for name in {request.drafter for request, _ in drafting}:
                mine = [request for request, _ in drafting if request.drafter == name]
                heads.ruled(mine, planner.stops_drafting.stop_rule(name, len(mine), batch, context))
        # Plans are what is wanted of the target's heads next. Where nothing was asked there are no drafts.
        return {request.request_id: plan for request, plan in drafting if heads.num_asked(request)}

    def _are_of_heads(self, requests: Sequence[Request]) -> bool:
        """Whether the target's heads draft for some, and for the others nobody."""
        drafters = self.planner.pool.drafters
        names = {request.drafter for request in requests}
        found = [drafters[name] for name in names if name in drafters]
        return bool(found) and all(drafter.capabilities.num_candidates for drafter in found)

    def begin(
        self, sent: OutstandingVerify, requests: Sequence[Request], running: Collection[Request]
    ) -> None:
        """A call that was planned ahead begins: its trees are known, as the call before is answered.

        Args:
            sent: the call.
            requests: in it that go on.
            running: everybody admitted.
        """
        planner = self.planner
        running = planner.proposing.taking_part(running, requests)
        planner.prompts.look(running)
        planner.num_running = len(running)
        self.newest = []
        plans = sent.plans or {}
        trees: dict[str, TokenTree] = {}
        drafted: dict[str, list[Request]] = {}
        for request in requests:
            name = sent.planned_by.get(request.request_id, request.drafter)
            plan = plans.get(request.request_id)
            request.drafted_by, request.drafted_kind = name, planner.cost.kinds.get(name, name)
            proposals, tree = request.proposals, TokenTree.root_only(request.last_token)
            if plan is not None and proposals is not None and proposals.position == request.num_tokens:
                sent.proposed[request.request_id] = proposals
                stops = frozenset(request.submit.sampling.stop_token_ids)
                tree = grown(request.last_token, plan, stops, proposals)
                drafted.setdefault(name, []).append(request)
            trees[request.request_id] = tree
            request.grown(tree)
        self.calls.grown(sent, requests, trees)
        for name, mine in drafted.items():
            self._count(name, mine, plans)

    def _count(self, name: str, requests: Sequence[Request], plans: Mapping[str, DraftPlan]) -> None:
        """What these trees took, and came to."""
        planner, proposed = self.planner, [r.proposals for r in requests if r.proposals is not None]
        seconds = sum([one.seconds for one in proposed])
        shapes = [_Shape(plans[request.request_id], request.proposals) for request in requests]
        width, depth = call_width(shapes), call_depth(shapes)
        num_context = sum([request.num_tokens for request in requests])
        cost, count = planner.cost, len(requests)
        predicted_s = cost.draft_seconds(name, count, width, depth, num_context)
        if name in planner.pool.drafters:
            cost.observe_draft(name, cost.layers_seconds(name, count, width, depth, num_context), seconds)
        num_drafted = sum([len(r.tree.token) - 1 for r in requests if r.tree is not None])
        planner.totals.drafted_tokens += num_drafted
        kind = cost.kinds.get(name, name)
        self.newest.append(Grown(name, kind, count, num_drafted, predicted_s, seconds))

    def take_grown(self) -> list[Grown]:
        """What was grown when a call began; each is told once."""
        found, self.newest = self.newest, []
        return found

    def score(self, result: VerifyResult, sent: OutstandingVerify, requests: Mapping[str, Request]) -> None:
        """Compare what was proposed for a call that was planned ahead with what came, before its commit."""
        for verdict in result.verdicts if sent.proposed else ():
            proposals, request = sent.proposed.get(verdict.request_id), requests.get(verdict.request_id)
            if proposals is not None and request is not None and verdict.tokens:
                scored, agreed = Layers(proposals).score(verdict.tokens)
                self.planner.pool.score(request.request_id, request.drafted_kind, scored, agreed)


def _bounded(request: Request, plan: DraftPlan) -> DraftPlan:
    """The plan for a request that may say how many tokens are drafted: nothing is selected afterwards."""
    if plan.width == 1 or request.submit.speculation.max_tokens is None:
        return plan
    return msgspec.structs.replace(plan, width=1)
