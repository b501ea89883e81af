"""For which requests something is proposed beside the target: those that will be drafted for from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.drafter_state import DrafterState
from cluster.policies.base import Rests
from cluster.requests import Request
from drafters.messages import DraftPlan, DraftResult
from engine.stop_rules import StopRule
from verifier.messages import VerifyResult

# All heads are asked for once in so many steps, whatever was planned last: in turn nothing is planned without
# proposals, so that without this it would never be noticed that drafting, or drafting deeper, pays again.
PROBE_STEPS = 32
# A plan for more requests than these, divided by this share, says nothing: drafting pays sooner for few.
FEWER_SHARE = 0.8


class Wanted(NamedTuple):
    """What is asked of the heads, or of EAGLE, for one request.

    Attributes:
        num_heads: heads evaluated, from the first, or layers of a beam.
        num_candidates: best tokens of each; 0 leaves the request out.
        least_logp: of the best path of a beam, for another layer to be worth its forward.
        stop_token_logp: of a token of a beam given its parent, for the token to be drafted after.
        stop_rule: where all beams of the call end, if the policy has such rules.
    """

    num_heads: int = 0
    num_candidates: int = 0
    least_logp: float = -math.inf
    stop_token_logp: float = -math.inf
    stop_rule: StopRule | None = None


NOTHING_WANTED = Wanted()


class LastPlan(NamedTuple):
    """The latest plan that was made with proposals at hand, or ahead of them.

    Attributes:
        step: when.
        num_requests: planned for together.
        depth, width: of the plan, or of the largest where it stands for all of them.
        ask: layers to ask EAGLE for next.
        least_logp: log-probability that its best path must have for another layer.
        stop_token_logp: its own.
        stop_rule: of the draft call that was made by it.
    """

    step: int
    num_requests: int
    depth: int
    width: int
    ask: int = 0
    least_logp: float = -math.inf
    stop_token_logp: float = -math.inf
    stop_rule: StopRule | None = None

    def is_of_many_more(self, num_requests: int) -> bool:
        """Whether it was made for so many more requests that it says nothing of these."""
        return num_requests < FEWER_SHARE * self.num_requests

    def beam(self, num_heads: int, widest: int) -> Wanted:
        """What is asked of EAGLE after it: so many layers, no wider than it was."""
        return Wanted(num_heads, min(widest, self.width), self.least_logp, self.stop_token_logp)


@dataclass(slots=True)
class HeadProposals:
    """Decides it when a verify call is built, one step before the plan that would use the proposals.

    So it goes by the plan before: who was drafted for is asked for again, as deep and wide as then.

    Attributes:
        drafters: by name.
        max_depth: deepest draft of the policy; a layer below it would be for nothing.
        rests: the policy, if it rests.
        num_steps: steps answered so far.
    """

    drafters: Mapping[str, DrafterState]
    max_depth: int
    rests: Rests | None
    num_steps: Callable[[], int]
    _plans: dict[str, LastPlan] = field(default_factory=dict)
    # Layers that the heads were asked for last, by request; of those whose drafter they were then.
    _asked: dict[str, int] = field(default_factory=dict)
    # Of the requests planned for last, those with such plans; for requests that have had none.
    _of_batch: LastPlan | None = None
    # Of the newest plan that drafts may be in again, as the policy found when it looked ahead.
    _looked_for: int = -1

    @property
    def are_there(self) -> bool:
        """Whether any drafter is the target's heads; without them nothing is wanted for anybody."""
        return any(drafter.capabilities.num_candidates for drafter in self.drafters.values())

    def wanted(self, request: Request, num_requests: int, num_outstanding: int) -> Wanted:
        """What the next verify call asks of the heads for the request, which is asked of them then.

        Args:
            request: in the call.
            num_requests: in the call.
            num_outstanding: calls that will be answered before it.
        """
        wanted = self._wanted(request, num_requests, num_outstanding)
        if self._is_of_heads(request):
            self._asked[request.request_id] = wanted.num_heads
        else:
            self._asked.pop(request.request_id, None)
        return wanted

    def _wanted(self, request: Request, num_requests: int, num_outstanding: int) -> Wanted:
        drafter = self.drafters.get(request.drafter)
        if drafter is None or drafter.capabilities.num_candidates == 0:
            return NOTHING_WANTED
        most = min(self.max_depth, _most_heads(request, drafter))
        step = self.num_steps() + num_outstanding + 1  # of the plan they would be for
        if most < 1 or (self.rests is not None and self.rests.rests(num_requests, step)):
            return NOTHING_WANTED
        last = self._plans.get(request.request_id)
        if not drafter.capabilities.has_independent_layers:
            last = last or self._of_batch
            is_due = self._is_due(last, step)
            wanted = _of_beam(most, drafter.capabilities.num_candidates, last, num_requests, is_due=is_due)
            rule = self._newest_rule(request, num_requests) if wanted.num_candidates else None
            return wanted if rule is None else wanted._replace(stop_rule=rule)
        all_of_them = Wanted(most, drafter.capabilities.num_candidates)
        if last is None and (self._of_batch is None or self._of_batch.depth > 0):
            return all_of_them
        last = last or self._of_batch
        if last is None or self._is_due(last, step) or last.is_of_many_more(num_requests):
            return all_of_them
        if last.depth == 0:
            return NOTHING_WANTED
        return Wanted(min(most, last.depth), min(all_of_them.num_candidates, last.width))

    def _is_due(self, last: LastPlan | None, step: int) -> bool:
        """Whether all requests are asked about for the plan of this step, whatever was planned last.

        Counted from zero and not since the last time, so that all are in one step: a policy that saw
        proposals for a few at a time would find that so few do not pay.
        """
        is_probe = last is not None and step // PROBE_STEPS != last.step // PROBE_STEPS
        return is_probe or step == self._looked_for

    def looked_ahead(self, step: int) -> None:
        """The policy looked, and may draft in this step: for that it needs proposals from all."""
        self._looked_for = step

    def _newest_rule(self, request: Request, num_requests: int) -> StopRule | None:
        """That of the request's last plan; of the batch's, if the request was not planned for since."""
        plans = [plan for plan in (self._plans.get(request.request_id), self._of_batch) if plan is not None]
        newest = max(plans, key=lambda plan: plan.step, default=None)
        return None if newest is None or newest.is_of_many_more(num_requests) else newest.stop_rule

    def planned(
        self, requests: Sequence[Request], plans: Sequence[DraftPlan], *, is_ahead: bool = False
    ) -> None:
        """The policy made these plans for these requests, `is_ahead` of the answer to the call before.

        In turn they are bounded by what was proposed. Ahead they are not: as deep is asked for next.
        """
        if not self.are_there:
            return
        step, n = self.num_steps() + is_ahead, len(requests)
        with_proposals = [
            (request, plan)
            for request, plan in zip(requests, plans, strict=True)
            if (self._is_of_heads(request) if is_ahead else self.num_proposed(request) > 0)
        ]
        for request, plan in with_proposals:
            ask = plan.depth if is_ahead else _next_depth(plan, self.num_proposed(request))
            self._plans[request.request_id] = LastPlan(
                step, n, plan.depth, plan.width, ask, _least_logp(plan), plan.stop_token_logp
            )
        # A request that is about to end is drafted for as its end allows, which says nothing of others.
        telling = [(request, plan) for request, plan in with_proposals if not self._is_ending(request)]
        if telling:
            depth = max(plan.depth for _, plan in telling)
            width = max(plan.width for _, plan in telling)
            ask = max(self._plans[request.request_id].ask for request, _ in telling)
            least = min(_least_logp(plan) for _, plan in telling)
            stop_token = min(plan.stop_token_logp for _, plan in telling)
            self._of_batch = LastPlan(step, n, depth, width, ask, least, stop_token)

    def ruled(self, requests: Sequence[Request], rule: StopRule | None) -> None:
        """The policy has drafts of these requests, just planned and of one drafter, end by this rule, if any.

        Beams that are grown next end by it, too: a step late, as they are as deep as was planned.
        """
        plans = self._plans
        for request in requests:
            if (last := plans.get(request.request_id)) is not None:
                plans[request.request_id] = last._replace(stop_rule=rule)
        if self._of_batch is not None and any(request.request_id in plans for request in requests):
            self._of_batch = self._of_batch._replace(stop_rule=rule)

    def rested(self, requests: Sequence[Request]) -> None:
        """The policy was not asked, and would have drafted nothing for these requests."""
        if not self._plans:
            return
        for request in requests:
            last = self._plans.get(request.request_id)
            if last is not None and last.depth > 0:
                self._plans[request.request_id] = LastPlan(self.num_steps(), len(requests), 0, 1)

    def num_proposed(self, request: Request) -> int:
        """Layers that were proposed for the request's drafter to draft from now; 0 if there are none.

        Of a beam as many as were asked for: where it ended before, no path was likely enough there, which
        says nothing of what is worth planning, as of any draft that its drafter ends.
        """
        drafter, proposals = self.drafters.get(request.drafter), request.proposals
        if drafter is None or drafter.capabilities.num_candidates == 0 or proposals is None:
            return 0
        if proposals.position != request.num_tokens:
            return 0
        return max(len(proposals.token), self._asked.get(request.request_id, 0))

    def num_asked(self, request: Request) -> int:
        """Layers that the latest call with the request asks of the target's heads."""
        return self._asked.get(request.request_id, 0) if self._is_of_heads(request) else 0

    def have_had_no_say(self, request: Request) -> bool:
        """Whether its drafter is the target's heads, but was not yet when they could have been asked."""
        return request.request_id not in self._asked and self._is_of_heads(request)

    def _is_of_heads(self, request: Request) -> bool:
        """Whether its drafter is the target's heads."""
        drafter = self.drafters.get(request.drafter)
        return drafter is not None and drafter.capabilities.num_candidates > 0

    def _is_ending(self, request: Request) -> bool:
        """Whether the request's own end bounds what its drafter may draft."""
        return request.num_remaining - 1 < self.drafters[request.drafter].capabilities.max_depth

    def waited_s(self, drafter: str, result: DraftResult) -> float:
        """Seconds of a draft call that its step waited for: what heads took was spent in the step before."""
        state = self.drafters.get(drafter)
        are_heads = state is not None and state.capabilities.num_candidates > 0
        return result.seconds - result.forward_seconds if are_heads else result.seconds

    def forget(self, request: Request) -> None:
        """The request ended."""
        self._plans.pop(request.request_id, None)
        self._asked.pop(request.request_id, None)


def _most_heads(request: Request, drafter: DrafterState) -> int:
    """Layers that can be drafted for the request once the step to come has brought it one token."""
    wish, capabilities = request.submit.speculation, drafter.capabilities
    if wish.mode == "off":
        return 0
    return min(
        capabilities.max_depth if wish.max_tokens is None else min(capabilities.max_depth, wish.max_tokens),
        request.num_remaining - 2,
        capabilities.max_tokens - request.num_tokens - 1,
    )


def _next_depth(plan: DraftPlan, num_proposed: int) -> int:
    """Layers to ask EAGLE for after this plan; where it took all there were, it might have taken more."""
    return plan.depth + (plan.depth >= num_proposed)


def _of_beam(most: int, widest: int, last: LastPlan | None, num_requests: int, *, is_due: bool) -> Wanted:
    """What is asked of EAGLE for a request, of which every layer and row costs.

    As wide as planned last: that goes by how many run, and not by what was proposed.
    """
    if last is None:
        return Wanted(most, 1)
    if last.depth > 0:
        return last.beam(min(most, last.ask), widest)
    is_due = is_due or last.is_of_many_more(num_requests)
    return last.beam(most, widest) if is_due else NOTHING_WANTED


def _least_logp(plan: DraftPlan) -> float:
    """What the best path of a layer must have for another: the draft would end there, or lack a forward."""
    return max(plan.stop_logp, plan.least_forward_logp)


def evaluating_s(result: VerifyResult) -> float:
    """Seconds that were spent beside the target in one call on what was proposed."""
    verdicts = [*result.verdicts, *(prefill.verdict for prefill in result.prefills)]
    proposals = [verdict.proposals for verdict in verdicts if verdict is not None]
    return sum([one.seconds for one in proposals if one is not None], 0.0)
