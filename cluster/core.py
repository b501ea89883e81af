"""The scheduler core: events in, actions out; no Ray, no torch, no clock, no sleep (design, idea 1)."""

from __future__ import annotations

from cluster import admission
from cluster.batching.batcher import Batcher
from cluster.batching.fair_queue import FairQueue
from cluster.batching.micro_batches import MicroBatches
from cluster.commits import commit, take_progress, within
from cluster.config import FlotillaConfig
from cluster.cost_model import CostModel
from cluster.door import Door
from cluster.draft_checks import awaiting, checked, take_drafts
from cluster.drafter_pool import DrafterPool
from cluster.events import (
    Action,
    Cancelled,
    CellDraining,
    ClientLost,
    DraftDone,
    DrafterDraining,
    DrafterReady,
    Drained,
    Event,
    Reject,
    RequestArrived,
    Tick,
    VerifierReady,
    Verify,
    VerifyDone,
    WorkerLost,
)
from cluster.forced_tokens import count
from cluster.learning import Learning
from cluster.planned_ahead import PlannedAhead
from cluster.planning import StepPlanner
from cluster.policies.base import Policy
from cluster.request_table import RequestTable
from cluster.requests import Request, State, Trigger
from cluster.sending_ahead import SendingAhead
from cluster.sharing import sharing_of
from cluster.stream_messages import Rejected
from cluster.verify_calls import VerifyCalls
from engine.tree import TokenTree
from verifier.messages import Verdict, VerifyCall, VerifyResult


class SchedulerCore:
    """Continuous batching with drafted token trees, for one target and a pool of drafters.

    Time is whatever the caller passes as `now`, in seconds; it must not go backwards.
    """

    def __init__(self, config: FlotillaConfig, policy: Policy, cost: CostModel) -> None:
        self.config = config
        self.cost = cost
        self.pool = DrafterPool(cost, config.policy.deepest, config.selector)
        self.pool.costs.sharing = sharing_of(config)
        self.planner = StepPlanner(policy, cost, self.pool, config.scheduler)
        self.batcher = Batcher(config.scheduler, cost, self.pool, FairQueue.of(config))
        self.batcher.shares_prompts = config.target.prefix_sharing
        self.planner.proposing.taking_part = self.batcher.taking_part
        self.micro_batches = MicroBatches(config.scheduler, cost, config.policy.deepest)
        self.verifier: VerifierReady | None = None
        # Of the target, also while it is made again: what comes meanwhile is judged by them.
        self.limits: VerifierReady | None = None
        self.free_slots = 0
        self.is_draining = False
        self.totals = self.planner.totals
        self.verify_calls = VerifyCalls(cost, self.planner.heads)
        self.planned_ahead = PlannedAhead(self.planner, self.verify_calls, config)
        self.sending_ahead = SendingAhead(self.planned_ahead, self.batcher, self.micro_batches)
        self.door = Door(config, cost, self.batcher.headroom, self.batcher.background_headroom)
        self.table = RequestTable(self.planner, self.verify_calls, self.micro_batches, self.door)
        self.requests, self.waiting = self.table.requests, self.table.waiting
        self.running = self.table.running
        pace, forecast = self.batcher.pace, self.door.forecast
        self.learning = Learning(cost, self.planned_ahead, pace, self.micro_batches, forecast)
        self._next_order = 0
        self._longest = 0  # `max_model_tokens` while an answer of the target is taken in
        # For `reflect`: when the event was, and whether it sent a call to the target.
        self._now, self._is_verify_new = 0.0, False

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in and say what to do now."""
        self.table.begin(self._look_back())
        self._now = now
        is_draft, is_refused = isinstance(event, DraftDone), False
        match event:
            case RequestArrived():
                is_refused = not self._arrive(event, now)  # hundreds may be in a second
            case Cancelled(request_id):
                self._cancel(request_id, now)
            case ClientLost(client):
                for request in [r for r in self.requests.values() if r.client == client]:
                    self._cancel(request.request_id, now)
            case DraftDone():
                self._draft_done(event, now)
            case VerifyDone(result):
                self._verify_done(result, now)
            case DrafterReady(name, capabilities, max_requests, kind, size):
                self.pool.add(name, capabilities, max_requests, kind, size)
            case DrafterDraining(name):
                self.pool.drain(name, self.requests.values())
            case CellDraining(with_running):
                self._drain(with_running, now)
            case VerifierReady():
                self._target_ready(event, now)
            case WorkerLost(name):
                self._worker_lost(name, now)
            case Tick():
                self._time_out_drafts(now)
        if not is_refused:
            self.door.has_changed()
            if not (is_draft and self.micro_batches.is_held_up(self.running.values())):
                self._progress(now, is_draft=is_draft)
        self.table.actions.extend(self.planner.move_on(now))
        self._is_verify_new = any(isinstance(action, Verify) for action in self.table.actions)
        actions = self.table.answer()
        actions.extend(Drained(name) for name in self.pool.take_drained())
        if self.is_idle and self.verifier is not None:  # its next call frees whatever requests have left
            self.free_slots = self.verifier.num_slots
        return actions

    def reflect(self) -> list[Action]:
        """Do what can wait until the actions are on their way; else the next event pays for most of it.

        Returns:
            the target's next call where that may be sent ahead, and what idle drafters read meanwhile, for
            drafts to come.
        """
        running, longest = self.running.values(), self.max_model_tokens
        call = self.sending_ahead.next_step(running, self.waiting, self.free_slots, longest, self._now)
        if call is None:
            return self._look_back()
        self._is_verify_new = True
        return [*self._sent(call), *self._look_back()]

    def _sent(self, call: VerifyCall) -> list[Action]:
        """The call, which is the last one, and what drafters read of the prompts that end with it."""
        ending = [self.requests[name] for name in self.verify_calls.ending]
        return [Verify(call), *self.planner.read_prompts(ending, self.running.values(), self._now)]

    def _look_back(self) -> list[Action]:
        reading: list[Action] = []
        sent = self.verify_calls.outstanding
        if self._is_verify_new and sent is not None:
            served = [self.requests[i] for i in sent.trees if i in self.requests]
            reading += self.planner.read_ahead(served, self._now, self.running.values(), sent.predicted_s)
        self._is_verify_new = False
        self.planner.reflect(is_last=not self.running)
        if self.micro_batches.rule.is_due:
            decoding = [request for request in self.running.values() if request.num_steps]
            views = [self.planner.view(request, 0.0, self.max_model_tokens) for request in decoding]
            self.micro_batches.review(views)
        return reading

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence served: the model's window, or what the KV pool holds if that is less."""
        limits = self.limits
        return 0 if limits is None else min(limits.max_tokens, limits.num_slots - admission.SLOT_MARGIN)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, running or outstanding."""
        return not self.requests and self.verify_calls.outstanding is None

    # Requests come and go

    def _arrive(self, event: RequestArrived, now: float) -> bool:
        answer = self.door.decide(event.submit, self, now)
        if isinstance(answer, Rejected):
            self.table.actions.append(Reject(event.client, answer))
            return False
        submit, arrived = answer.submit, now - answer.submit.waited_s
        request = Request(submit, event.client, arrived, self._next_order, answer.predicted, [*submit.output])
        self._next_order += 1
        self.requests[request.request_id] = request
        reason = request.finish_reason(self.max_model_tokens)
        if reason is None:
            self.table.queue(request)
        else:  # resubmitted when only its end was left to tell
            self.table.finish(request, reason, now)
        return True

    def _cancel(self, request_id: str, now: float) -> None:
        if (request := self.requests.get(request_id)) is not None:
            self.table.finish(request, "cancelled", now)

    def _drain(self, with_running: bool, now: float) -> None:
        self.is_draining = True
        for request in list(self.requests.values()):
            if with_running or request.state is State.WAITING:
                self.table.turn_away(request, admission.draining(request.submit), now)

    # Answers

    def _draft_done(self, event: DraftDone, now: float) -> None:
        outstanding = self.pool.outstanding(event.drafter, event.result.call_id)
        if outstanding is None or self.limits is None:
            return
        vocab_size, longest = self.limits.vocab_size, self.max_model_tokens
        result, trees = checked(event, outstanding, self.requests, vocab_size, longest)
        self.pool.answered(event.drafter, result, now, trees)
        self.totals.draft_forward_s += result.forward_seconds
        self.cost.observe_draft(event.drafter, outstanding.layers_s, result.seconds)
        if outstanding.depth == 0:
            return  # nobody waits for what is only read
        drafted = take_drafts(result, self.requests)
        self.planner.trees = trees
        self.totals.drafted_tokens += sum([len(r.tree.token) - 1 for r in drafted if r.tree is not None])
        self.micro_batches.drafted(drafted, self.planner.heads.waited_s(event.drafter, result), now)
        # Whoever got no tree (unknown to the drafter, or left out) is verified without one.
        if len(drafted) < len(outstanding.request_ids):
            for request in awaiting(outstanding, self.requests):
                request.drafted(TokenTree.root_only(request.last_token))

    def _verify_done(self, result: VerifyResult, now: float) -> None:
        if (sent := self.verify_calls.answered(result)) is None:
            return
        self._longest = self.max_model_tokens
        self.free_slots = result.free_slots
        self.learning.verified(result, sent, self.requests, self.running, now)
        following = self.verify_calls.ahead
        ahead = () if following is None else following.trees.keys()
        for verdict in result.verdicts:
            if (request := self.requests.get(verdict.request_id)) is None or not sent.awaits(request):
                continue  # cancelled while the target worked on it
            if verdict.request_id not in ahead:
                request.advance(Trigger.VERIFIED)
            self._commit(request, verdict, now)
        for progress in result.prefills:
            if (request := self.requests.get(progress.request_id)) is None or not sent.awaits(request):
                continue
            self.totals.cached_prompt_tokens += take_progress(request, progress, following)
            if progress.verdict is not None:
                self._commit(request, progress.verdict, now)
        for request in [r for i in result.unknown if (r := self.requests.get(i)) and sent.lacks(r)]:
            self._preempt(request, lost=True)
        answered = [r for i in result.deferred if (r := self.requests.get(i)) and sent.awaits(r)]
        # Those in the call sent ahead go on with that, also if this one had no slots for them.
        deferred = [r for r in answered if following is None or not following.goes_on_with(r)]
        for request in deferred:
            request.deferred()
        if deferred and len(running := self.running.values()) > 1:
            self._preempt(admission.victim(running, now, self.planner.step_s, self.config.tiers))
        self.sending_ahead.begin(self.running.values(), now)

    def _commit(self, request: Request, verdict: Verdict, now: float) -> None:
        verdict = within(verdict, request, self._longest)
        event = commit(request, verdict, now)
        self.totals.committed_tokens += len(verdict.tokens)
        if verdict.num_forced:
            count(self.totals, verdict)
        reason = "error" if verdict.error or verdict.is_broken else request.finish_reason(self._longest)
        if reason is not None:
            self.table.finish(request, reason, now, event)
            return
        self.table.tell(request, event)

    # Losses, and the target's return

    def _target_ready(self, ready: VerifierReady, now: float) -> None:
        self.verifier, self.limits, self.free_slots = ready, ready, ready.num_slots
        self.door.outages.ready(now)
        # Where its pool is smaller than before, who fits no more would be sent to it in vain for ever.
        for request in [r for r in self.waiting if r.num_tokens >= self.max_model_tokens]:
            if request.output:
                self.table.finish(request, "length", now)
            else:
                self.table.turn_away(request, admission.too_long(request.submit, self), now)

    def _worker_lost(self, name: str, now: float) -> None:
        if name != "verifier":
            for request in self.planner.drafter_lost(name, self.requests.values()):
                if request.state is State.DRAFTING:
                    request.drafted(TokenTree.root_only(request.last_token))
            self.micro_batches.keep(self.pool.drafters)
            return
        self.verifier = None
        self.door.lost(now)
        self.verify_calls.lose()
        for request in list(self.running.values()):
            self._preempt(request, lost=True)

    def _time_out_drafts(self, now: float) -> None:
        late = now - self.config.scheduler.draft_timeout_ms / 1e3
        for drafter in self.pool.drafters.values():
            for call in drafter.outstanding.values():
                is_in_time = late < call.sent_at <= now  # later than now: the clock was put back
                for request in () if is_in_time else awaiting(call, self.requests):
                    self.totals.draft_timeouts += 1
                    request.drafted(TokenTree.root_only(request.last_token))
                    self.pool.leave_behind(drafter.name)

    def _preempt(self, request: Request, *, lost: bool = False) -> None:
        self.free_slots += self.table.preempt(request, self, lost=lost)

    # Progress: admit, draft, verify

    def _progress(self, now: float, *, is_draft: bool) -> None:
        if self.verifier is None:
            return
        if self.waiting and not is_draft:  # a draft makes no room
            self._admit(now)
        running = self.running.values()
        by_batch = self.micro_batches.members(running)
        for members in by_batch.values():
            ready = self.micro_batches.ready_to_draft(members)
            if ready:
                context = self.batcher.context(now, self.free_slots, self.planner.step_s)
                ready = self.batcher.rule.decode(ready, members, context)
            if ready:
                self.micro_batches.begin(ready, now)
                self.table.actions.extend(self.planner.draft(ready, running, now, self.max_model_tokens))
        if self.verify_calls.outstanding is None:
            self._verify(by_batch, now)
            return
        call = self.sending_ahead.complete(by_batch, running, self.free_slots, self.max_model_tokens, now)
        self.table.actions.extend([] if call is None else [Verify(call)])

    def _admit(self, now: float) -> None:
        context = self.batcher.context(now, self.free_slots, self.planner.step_s)
        answer = self.batcher.admit(self.waiting, self.running.values(), context)
        for request in answer.preempted:
            self._preempt(request)
        self.pool.assign(answer.admitted, now, is_drafting=False)
        for request in answer.admitted:
            self.table.admit(request)

    def _verify(self, by_batch: dict[int, list[Request]], now: float) -> None:
        drafted = self.micro_batches.to_verify(by_batch, now)
        prefilling = [r for r in self.running.values() if r.state is State.PREFILLING]
        if not drafted and not prefilling:
            return
        rule, running, owed = self.batcher.rule, self.running.values(), self.verify_calls.num_owed
        drafted = rule.verify(drafted, prefilling, running)
        # While drafters draft, the target would be idle: it prefills alone rather than with the trees.
        chosen = self.planner.select(drafted, now, self.max_model_tokens)
        num_rows = sum([len(tree.token) for tree in chosen.values()])
        context = self.batcher.context(now, self.free_slots, self.planner.step_s)
        chunks = rule.prefill(prefilling, drafted, num_rows, running, context)
        needed = num_rows + sum(tokens for _, tokens in chunks)
        if needed > self.free_slots + owed:
            # Drafts are the first to go, then the request with the most slack.
            chosen = {r.request_id: TokenTree.root_only(r.last_token) for r in drafted}
            while len(chosen) > self.free_slots + owed and len(self.running) > 1:
                victim = admission.victim(self.running.values(), now, self.planner.step_s, self.config.tiers)
                self._preempt(victim)
                chosen.pop(victim.request_id, None)
            drafted = [r for r in drafted if r.request_id in chosen]
            chunks = [(r, n) for r, n in chunks if r.state is State.PREFILLING]
            if not drafted and not chunks:  # all of them gave way; others can go on now
                self._progress(now, is_draft=True)
                return
        call = self.verify_calls.build(drafted, chosen, chunks, now)
        self.table.actions.extend([] if call is None else self._sent(call))
