"""The step planner: asks the policy, builds draft calls and draft trees, learns from what was verified."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cluster.batching.iteration import Iteration
from cluster.calibration import Calibration
from cluster.catching_up import catch_up
from cluster.config import SchedulerConfig
from cluster.cost_model import CostModel
from cluster.decode_views import DecodeViews
from cluster.draft_items import draft_items, has_read
from cluster.drafter_pool import DrafterPool
from cluster.drafter_state import call_depth, call_width
from cluster.drafting_time import drafting_seconds, seconds_ahead
from cluster.events import Draft
from cluster.forest import Forest
from cluster.head_proposals import HeadProposals, evaluating_s
from cluster.policies.base import DecodeRequest, LooksAhead, Policy, Rests, StepContext, StopsDrafting
from cluster.policies.decode_batch import DecodeBatch
from cluster.prompt_share import PromptShare
from cluster.proposing import Proposing
from cluster.requests import Request, State, Trigger, advance_all
from cluster.running_mean import SMOOTHING
from cluster.step_overhead import StepOverhead
from cluster.totals import Totals
from drafters.messages import DraftPlan
from engine.tree import TokenTree
from engine.tree_batch import TreeBatch, subsets
from selector.protocol import Outcome
from verifier.messages import VerifyResult

# Verified trees are calibrated on when there are so many, or after so many steps.
CALIBRATE_TREES, CALIBRATE_STEPS = 64, 16
# An iteration counts as at most so many times what one is expected to take: a hiccup is not believed.
MOST_TIMES = 10.0
# With more requests running there is no idle time in which drafters are scored on those they do not serve.
EXPLORE_REQUESTS = 2


class StepPlanner:
    """One step planner for every policy (design, idea 4)."""

    def __init__(
        self, policy: Policy, cost: CostModel, pool: DrafterPool, scheduler: SchedulerConfig
    ) -> None:
        """Plan for `policy`; `scheduler.draft_ahead` drafters may go on while the target verifies."""
        self.policy = policy
        self._draft_ahead = scheduler.draft_ahead or 0
        pool.switching.most_at_once = max(1, self._draft_ahead)
        self.cost, self.pool = cost, pool
        self.calibration = Calibration(cost.kinds)
        self.totals = Totals()
        self.step_s = cost.verify_seconds(1, 1, 0)
        self.trees = TreeBatch()  # of the draft call answered last: mostly what is selected from
        self._views: dict[str, DecodeRequest] = {}
        self._batch = DecodeBatch()  # those planned for last: mostly they are selected for together
        self._to_calibrate: list[tuple[list[TokenTree], list[str], list[list[int]]]] = []
        self._rests = policy if isinstance(policy, Rests) else None
        # Of others it is not known in time that they draft nothing.
        self._sends_ahead = scheduler.async_scheduling and self._rests is not None
        self.overhead = StepOverhead(cost.profile.overhead_s, sends_ahead=self._sends_ahead)
        self.prompts = PromptShare.of(scheduler, cost.profile.target)
        self._looks_ahead = policy if isinstance(policy, LooksAhead) else None
        self._tries_drafts = getattr(policy, "tries_drafts", True)
        self._looked_at, self.num_running = -1, 0
        self.heads = HeadProposals(pool.drafters, pool.max_depth, self._rests, lambda: self.totals.steps)
        self.decode_views = DecodeViews(pool, self.heads)
        self.stops_drafting = policy if isinstance(policy, StopsDrafting) else None
        self.proposing = Proposing()
        # Who will be resting at the end of all steps.
        self._never_drafts = self.is_resting(1, sys.maxsize)
        # Requests whose drafter was lost in the event at hand.
        self._orphans: list[Request] = []

    def may_read(self, request: Request) -> bool:
        """Whether a drafter should read the request's prompt at all."""
        if self._never_drafts:
            return False
        return self.proposing.reads(request.order, self.num_running)

    def draft(
        self, ready: Sequence[Request], running: Collection[Request], now: float, max_model_tokens: int
    ) -> list[Draft]:
        """Ask the policy for shapes; move every request to DRAFTING or, with nothing to draft, DRAFTED."""
        running = self.proposing.taking_part(running, ready)
        self.prompts.look(running)
        self.num_running = len(running)
        if self.is_resting(len(ready), self.totals.steps):
            self.pool.leave_draining(ready)
            self._rest(ready)
            for request in ready:
                request.drafted_by = request.drafted_kind = ""
                request.drafted(TokenTree.root_only(request.last_token))
            return []
        self.pool.assign(ready, now)
        kinds = self.cost.kinds
        for request in ready:
            request.drafted_by = by = "" if self.heads.have_had_no_say(request) else request.drafter
            request.drafted_kind = kinds.get(by, by)
        # Kept for selection: A(r) counts from the start of the iteration, whose length t_spec estimates.
        batch = DecodeBatch(self.decode_views.of_all(ready, now, max_model_tokens))
        self._views.update(zip([request.request_id for request in ready], batch, strict=True))
        self._batch = batch
        context = self.context(len(batch))
        plans = self.policy.plan(batch, context)
        self.heads.planned(ready, plans)
        # Whom no drafter has read yet, nothing can be proposed for: that says nothing of whether it pays.
        asked = [plan.depth > 0 for view, plan in zip(batch, plans, strict=True) if view.max_draft]
        if asked:
            self.proposing.planned(self.num_running, sum(asked) / len(asked))
        drafting: dict[str, tuple[list[Request], list[DraftPlan]]] = {}
        actions, behind = [], []
        can_draft = {name: has_read(drafter) for name, drafter in self.pool.drafters.items()}
        for request, plan in zip(ready, plans, strict=True):
            name = request.drafter
            if plan.depth <= 0 or not name:
                request.drafted(TokenTree.root_only(request.last_token))
            elif not can_draft[name](request):
                behind.append(request)
                request.drafted_by = request.drafted_kind = ""  # it reads, and serves nobody yet
                request.drafted(TokenTree.root_only(request.last_token))
            else:
                mine = drafting.get(name)
                if mine is None:
                    mine = drafting[name] = ([], [])
                mine[0].append(request)
                mine[1].append(plan)
        # Those with most to draft may go on while the target verifies: they have a core to themselves.
        ahead = sorted(drafting, key=lambda name: -len(drafting[name][0]))[: self._draft_ahead]
        ahead_s = dict.fromkeys(ahead, seconds_ahead(self.cost, batch, plans, context.draft_overhead_s))
        for name, (requests, shapes) in drafting.items():
            items = draft_items(self.pool.drafters[name], requests, shapes)
            depth, width = call_depth(items), call_width(items)
            num_context = sum([request.num_tokens for request in requests])
            predicted_s = self.cost.draft_seconds(name, len(items), width, depth, num_context)
            rule = None
            if self.stops_drafting is not None:
                rule = self.stops_drafting.stop_rule(name, len(items), batch, context)
                if self.pool.drafters[name].capabilities.num_candidates:
                    self.heads.ruled(requests, rule)
            call = self.pool.call(name, items, now, predicted_s, rule, ahead_s.get(name, 0.0), num_context)
            for request in requests:
                request.draft_call = call.call_id
            advance_all(requests, Trigger.DRAFT_SENT)
            actions.append(Draft(name, call))
        return actions + self._catch_up(behind, now)  # nobody's draft waits for what is read meanwhile

    def will_rest(self, requests: Sequence[Request], now: float, max_model_tokens: int) -> bool:
        """Whether surely nothing is drafted, nor proposed, for these in the step after that at the target."""
        if not any(map(self.pool.allowed, requests)):
            return True
        if self._rests is None:
            return False
        step, count = self.totals.steps + 1, len(requests)
        # Heads propose in that step for the one after it, whose plan must not lack that.
        steps = (step, step + 1) if self.heads.are_there else (step,)
        if all(self._rests.rests(count, step) for step in steps):
            return True
        looks = self._looks_ahead
        if looks is None or self._looked_at == step or (self.heads.are_there and not self._tries_drafts):
            return False
        self._looked_at = step  # once, whatever happens until the answer
        self.pool.assign(requests, now, is_drafting=False)
        views = self.decode_views.of_all(requests, now, max_model_tokens, has_proposals=False)
        looks.look_ahead(DecodeBatch(views), replace(self.context(count), step=steps[-1]))
        if not all(self._rests.rests(count, step) for step in steps):
            self.heads.looked_ahead(steps[-1])
            return False
        self.proposing.planned(self.num_running, 0.0)
        return True

    def rest(self, requests: Sequence[Request], running: Collection[Request]) -> None:
        """A step of these requests begins as `will_rest` said, and without the policy being asked."""
        running = self.proposing.taking_part(running, requests)
        self.prompts.look(running)
        self.num_running = len(running)
        for request in requests:
            request.drafted_by = request.drafted_kind = ""
        self.pool.leave_draining(requests)
        if self.is_resting(len(requests), self.totals.steps):
            self._rest(requests)

    def is_resting(self, count: int, step: int) -> bool:
        """Whether the policy said that it drafts nothing for so many requests in this step."""
        return self._rests is not None and self._rests.rests(count, step)

    def _rest(self, ready: Sequence[Request]) -> None:
        self.proposing.rested(self.num_running)
        self.heads.rested(ready)

    def select(self, drafted: Sequence[Request], now: float, max_model_tokens: int) -> dict[str, TokenTree]:
        """The draft trees to verify, by request id."""
        trees = TreeBatch(
            [r.tree if r.tree is not None else TokenTree.root_only(r.last_token) for r in drafted]
        )
        if max([len(tree.token) for tree in trees], default=1) == 1:
            return {r.request_id: tree for r, tree in zip(drafted, trees, strict=True)}
        if trees == self.trees:
            trees = self.trees
        known, longest = self._views.get, max_model_tokens
        batch = DecodeBatch([known(r.request_id) or self.view(r, now, longest) for r in drafted])
        if batch == self._batch:
            batch = self._batch
        context = self.context(len(batch), drafting_seconds(self.cost, drafted, trees))
        selected = self.policy.select(batch, trees, context)
        # Trees are in topological order, so a prefix of the nodes is closed under parent.
        for place, request in enumerate(drafted):
            most = request.submit.speculation.max_tokens
            if most is not None:
                selected[place] = selected[place][: most + 1]
        self.calibration.selected(
            (r.drafted_kind, len(tree.token) - 1, len(nodes) - 1)
            for r, tree, nodes in zip(drafted, trees, selected, strict=True)
            if r.drafted_kind
        )
        chosen = subsets(trees, selected)
        return {request.request_id: tree for request, tree in zip(drafted, chosen, strict=True)}

    def drafter_lost(self, name: str, requests: Iterable[Request]) -> list[Request]:
        """A drafter is gone; the requests it served, for which `move_on` finds others."""
        orphans = self.pool.lose(name, requests)
        self._orphans.extend(orphans)
        return orphans

    def move_on(self, now: float) -> list[Draft]:
        """Requests whose drafter was lost go to others, which read them while the target verifies.

        Those that are drafted for anew in the same event have been given theirs by then.
        """
        orphans, self._orphans = self._orphans, []
        settled = (State.READY, State.WAITING, State.FINISHED)
        moving = [request for request in orphans if not request.drafter and request.state not in settled]
        if not moving:
            return []
        self.pool.assign(moving, now, is_drafting=False)
        return self._catch_up([request for request in moving if self.may_read(request)], now)

    def read_prompts(
        self, requests: Iterable[Request], running: Collection[Request], now: float
    ) -> list[Draft]:
        """Drafters read prompts while the target computes the ends of them: quick first drafts."""
        self.num_running = len(self.proposing.taking_part(running, ()))
        return self._catch_up([r for r in requests if not r.heard and self.may_read(r)], now)

    def _catch_up(self, requests: Iterable[Request], now: float) -> list[Draft]:
        """For no longer than a step takes: meanwhile nobody is drafted for by these drafters."""
        behind = [request for request in requests if request.drafter]
        return [Draft(name, call) for name, call in catch_up(self.pool, behind, now, self.step_s)]

    def read_ahead(
        self, requests: Sequence[Request], now: float, running: Collection[Request], idle_s: float
    ) -> list[Draft]:
        """What idle drafters read while the target verifies: for switches to come, and to be scored.

        Args:
            requests: in the verify call.
            now: the scheduler's clock.
            running: everybody admitted.
            idle_s: seconds the call will take.
        """
        if self._never_drafts:
            return []
        self.num_running = len(self.proposing.taking_part(running, ()))
        read = requests if self.proposing.pays(self.num_running) else [*filter(self.may_read, requests)]
        calls = self.pool.switching.prepare(read, now, idle_s) if self.pool.config.fast_switching else []
        if self.num_running <= EXPLORE_REQUESTS:
            for request in read:
                calls.extend(self.pool.explorer.running(request, now))
        return [Draft(name, call) for name, call in calls]

    def forget(self, request: Request, now: float, running: Collection[Request]) -> list[Draft]:
        """The request ended, these go on; what idle drafters read of it for later ones."""
        self._views.pop(request.request_id, None)
        self.heads.forget(request)
        calls, self.num_running = [], len(self.proposing.taking_part(running, ()))
        if self.may_read(request):
            calls = self.pool.explorer.final(request, now, is_busy=self.num_running >= EXPLORE_REQUESTS)
        self.pool.forget(request)
        return [Draft(name, call) for name, call in calls]

    def view(self, request: Request, now: float, max_model_tokens: int) -> DecodeRequest:
        """The request in the papers' terms."""
        return self.decode_views.of(request, now, max_model_tokens)

    def learn(
        self, result: VerifyResult, verified: Mapping[str, TokenTree], requests: Mapping[str, Request]
    ) -> None:
        """Count what one verified batch accepted; `reflect` calibrates on it."""
        trees, drafters, accepted_nodes = [], [], []
        by_kind: dict[str, list[int]] = {}
        tree_of, request_of = verified.get, requests.get
        for verdict in result.verdicts:
            tree, request = tree_of(verdict.request_id), request_of(verdict.request_id)
            if tree is None or request is None:
                continue
            num_drafted, name = len(tree.token) - 1, request.drafted_kind
            if not num_drafted or not name:
                continue
            nodes = verdict.nodes
            counts = by_kind.setdefault(name, [0, 0])
            counts[0] += num_drafted
            counts[1] += len(nodes)
            trees.append(tree)
            drafters.append(name)
            accepted_nodes.append(nodes)
        for name, (num_verified, num_accepted) in by_kind.items():
            self.totals.verified_tokens += num_verified
            self.totals.accepted_tokens += num_accepted
            self.totals.verified_by_drafter[name] += num_verified
            self.totals.accepted_by_drafter[name] += num_accepted
        if trees:
            self._to_calibrate.append((trees, drafters, accepted_nodes))

    def tell_selector(
        self,
        result: VerifyResult,
        verified: Mapping[str, TokenTree],
        requests: Mapping[str, Request],
        own_s: Callable[[str], float],
    ) -> None:
        """What an iteration brought each request, in seconds of its own; before they are forgotten."""
        if not self.pool.selector.learns_from_steps:
            return
        outcomes = []
        for verdict in result.verdicts:
            tree, request = verified.get(verdict.request_id), requests.get(verdict.request_id)
            if tree is not None and request is not None:
                num_tokens, num_drafted = len(verdict.tokens), len(tree.token) - 1
                kind, seconds = request.drafted_kind, own_s(request.request_id)
                outcomes.append(Outcome(request.request_id, kind, num_tokens, num_drafted, seconds))
        self.pool.observe(outcomes)

    def reflect(self, *, is_last: bool) -> None:
        """Work that can wait until the next calls are on their way: calibrating, several steps at once.

        Most of it is as much for few trees as for many. If the last step was the last one, there may be no
        further step for long.
        """
        pending = self._to_calibrate
        if (
            is_last
            or len(pending) >= CALIBRATE_STEPS
            or sum([len(step[0]) for step in pending]) >= CALIBRATE_TREES
        ):
            self.calibrate()

    def calibrate(self) -> None:
        """Calibrate on all that `learn` took in."""
        pending = self._to_calibrate
        if not pending:
            return
        forest = Forest.of([tree for trees, _, _ in pending for tree in trees])
        drafters = [name for _, names, _ in pending for name in names]
        accepted_nodes = [nodes for _, _, of_step in pending for nodes in of_step]
        on_path = np.zeros(forest.num_nodes, dtype=np.bool_)
        on_path[forest.roots] = True
        roots = forest.roots.tolist()
        on_path[[r + node for r, nodes in zip(roots, accepted_nodes, strict=True) for node in nodes]] = True
        self.calibration.observe(forest, drafters, on_path)
        pending.clear()

    def measure_iteration(self, iteration: Iteration, result: VerifyResult) -> None:
        """Fold one whole iteration into t_spec, and what it took of the target's time into the overhead.

        Evaluating heads is drafting, in the step that spends it, whether or not the next one drafts.
        """
        forward_s, heads_s = result.forward_seconds, evaluating_s(result)
        self.totals.iterations += 1
        self.totals.step_tokens += sum([len(verdict.tokens) for verdict in result.verdicts])
        self.totals.step_s += iteration.elapsed_s
        self.totals.step_draft_s += iteration.draft_s + heads_s
        self.totals.step_verify_s += forward_s
        self.totals.step_target_s += max(0.0, result.seconds - forward_s - heads_s)
        self.step_s += SMOOTHING * (min(iteration.elapsed_s, MOST_TIMES * self.step_s) - self.step_s)
        overhead = max(0.0, iteration.slot_s - iteration.draft_s - heads_s - forward_s)
        count, drafted, ahead = len(result.verdicts), iteration.drafted, iteration.was_ahead
        settled = self.cost.has_settled
        self.overhead.observe(count, overhead, drafted=drafted, was_ahead=ahead, settled=settled)

    def context(self, num_requests: int, draft_s: float = 0.0) -> StepContext:
        """What a policy may read now besides so many requests."""
        return StepContext(
            cost=self.cost,
            calibration=self.calibration,
            step_s=self.step_s,
            draft_s=draft_s,
            plain_overhead_s=self.overhead.plain_s(num_requests),
            draft_overhead_s=self.overhead.drafted_s(num_requests),
            step=self.totals.steps,
            prompt_share=self.prompts.ahead,
            prompts_s=self.prompts.took_s,
            prompt_rows=self.prompts.rows,
            sends_ahead=self._sends_ahead,
        )
