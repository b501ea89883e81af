"""Calls that are sent to the target while it works on another, so that it need not wait for them.

Of several micro-batches, one that is complete. Of a single one, its next step, if nobody is drafted for in
it: then nothing in it depends on the answer to the one before but the last token of each request, which the
target knows itself (vLLM's "async scheduling", SGLang's overlap scheduler). Or if all who are drafted for are
so from what is proposed beside the target (`cluster.planned_ahead`). It may read prompts of others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.batching.base import Chunk
from cluster.batching.batcher import Batcher
from cluster.batching.micro_batches import MicroBatches
from cluster.outstanding_verify import OutstandingVerify
from cluster.planned_ahead import PlannedAhead
from cluster.requests import Request, State
from drafters.messages import DraftPlan
from verifier.messages import VerifyCall

# Where one who waits may be given the place of one who runs, so many steps are sent ahead in a row at most:
# whose place is taken must be in none.
MOST_BESIDE_WAITING = 2
# A step is sent so long before the forward at hand should end, and each of its requests as much earlier:
# planning takes as long. What is proposed after the forward is to spare.
LEAD_S, LEAD_PER_REQUEST_S = 1.5e-3, 5e-5
# Nobody is woken for less.
LEAST_HELD_S = 5e-4


@dataclass(slots=True)
class SendingAhead:
    """Whether, and for whom, a call is sent while another is at the target; no more than two are there.

    Attributes:
        planned_ahead: plans drafts of a step that is sent ahead, and its planner knows when there are none.
        batcher: its rule may let some requests wait.
        micro_batches: of the running requests.
        holds_back: whether somebody will ask again at `held_until`, by a `Tick`.
        held_until: when the next step is to be sent, if it could be sent now; else None.
    """

    planned_ahead: PlannedAhead
    batcher: Batcher
    micro_batches: MicroBatches
    holds_back: bool = False
    held_until: float | None = None

    def _due_at(self, sent: OutstandingVerify, now: float) -> float | None:
        """When the step after this one is to be sent, if not yet: who comes until then is read in it.

        Only where something is proposed after the forward: that is to spare if it ends sooner than it should.
        """
        if not (self.holds_back and sent.proposes and self.planned_ahead.is_possible):
            return None
        lead_s = LEAD_S + LEAD_PER_REQUEST_S * len(sent.members)
        at = sent.sent_at + sent.predicted_s - lead_s
        return at if at > now + LEAST_HELD_S else None

    def complete(
        self,
        by_batch: Mapping[int, list[Request]],
        running: Collection[Request],
        free_slots: int,
        max_model_tokens: int,
        now: float,
    ) -> VerifyCall | None:
        """The call of a micro-batch that is complete while another is with the target; None if none is due.

        Args:
            by_batch: running requests by micro-batch.
            running: everybody admitted.
            free_slots: of the target, as last known.
            max_model_tokens: longest sequence served.
            now: the scheduler's clock.
        """
        if not self.micro_batches.is_next_due(by_batch, self.planned_ahead.calls, now):
            return None
        complete = self.micro_batches.to_verify(by_batch, now)
        drafted = self.batcher.rule.verify(complete, [], running)
        most = sum(len(request.tree) for request in drafted if request.tree is not None)
        if not drafted or most + self.planned_ahead.calls.num_tokens > free_slots:
            return None
        chosen = self.planned_ahead.planner.select(drafted, now, max_model_tokens)
        return self.planned_ahead.calls.build(drafted, chosen, [], now)

    def next_step(
        self,
        running: Collection[Request],
        waiting: Collection[Request],
        free_slots: int,
        max_model_tokens: int,
        now: float,
    ) -> VerifyCall | None:
        """The next step of all that is running, before the step at the target is answered; None if it must
        wait for that.

        It must wait where anybody is or may be drafted for by others than the target's heads, or follows a
        grammar, and now and then where one who waits may be given the place of one who runs. Who surely ends
        with the answer is left out; who turns out to end gets a verdict that nobody waits for.

        Args:
            running: everybody admitted.
            waiting: everybody who is not.
            free_slots: of the target, as last known.
            max_model_tokens: longest sequence served.
            now: the scheduler's clock.
        """
        self.held_until = None
        outstanding = self.planned_ahead.calls.all_outstanding
        if not self.planned_ahead.config.scheduler.async_scheduling or len(outstanding) != 1:
            return None
        self.held_until = self._due_at(outstanding[0], now)
        if self.held_until is not None:
            return None
        sent, room = outstanding[0], free_slots + self.planned_ahead.calls.num_owed
        if self.micro_batches.count != 1 or sent.num_tokens + len(running) > room:
            return None
        going_on, prefilling, partly, sitting_out = [], [], [], []
        for request in running:
            if request.state is State.READY:
                sitting_out.append(request)
                continue
            if request.state is State.PREFILLING:
                if sent.has(request):
                    return None  # its chunk before had no slots
                prefilling.append(request)
                continue
            if request.state is State.PREFILL_SENT and request.request_id not in sent.ending:
                partly.append(request)
                continue
            # A grammar has nothing to say of what follows its end, where the answer may have come to.
            if not _goes_on(request, sent) or request.submit.sampling.constraint is not None:
                return None
            if request.num_remaining > 1 and request.num_tokens + 1 < max_model_tokens:
                going_on.append(request)
        rests = self._rests(going_on, sent, now, max_model_tokens) if going_on else self._reads_on(partly)
        if not rests and not going_on:
            return None
        context = self.batcher.context(now, free_slots, self.planned_ahead.planner.step_s)
        is_turn = waiting and sent.num_ahead >= MOST_BESIDE_WAITING
        if is_turn and self.batcher.may_take_place(list(waiting), running, context):
            return None
        rule, count = self.batcher.rule, len(going_on)
        # Nobody else would be let wait by the rule in this step either.
        could_go_on = going_on + sitting_out
        if could_go_on and rule.decode(could_go_on, could_go_on, context) != going_on:
            return None
        if len(rule.verify(going_on, prefilling + partly, running)) < count:
            return None
        plans: Mapping[str, DraftPlan] | None = None
        if not rests:
            plans = self.planned_ahead.plan(going_on, now, max_model_tokens)
            if plans is None:
                return None
            count += sum([plan.depth * plan.width for plan in plans.values()])
        chunks: list[Chunk] = []
        with _read_on(partly, sent):
            if prefilling or partly:
                chunks = rule.prefill(prefilling + partly, going_on, count, running, context)
            if sent.num_tokens + count + sum([tokens for _, tokens in chunks]) > room:
                return None
            if not going_on and not chunks:
                return None
            return self.planned_ahead.calls.build_ahead(going_on, chunks, now, plans)

    def _rests(
        self, going_on: Sequence[Request], sent: OutstandingVerify, now: float, max_model_tokens: int
    ) -> bool:
        """Whether the next step is surely a plain one, after one that decides one token of each."""
        return sent.decides_one and self.planned_ahead.planner.will_rest(going_on, now, max_model_tokens)

    def _reads_on(self, partly: Sequence[Request]) -> bool:
        """Whether prompts alone are read ahead: the next parts of some, at whose ends nothing proposes."""
        return bool(partly) and not self.planned_ahead.planner.heads.are_there

    def begin(self, running: Collection[Request], now: float) -> None:
        """An answer is taken in: if the plain step after it was sent ahead, that begins.

        Args:
            running: everybody admitted who has not ended with the answer.
            now: the scheduler's clock.
        """
        ahead = self.planned_ahead.calls.ahead
        if ahead is None or not self.planned_ahead.calls.begin_ahead(now):
            return
        going_on = [request for request in running if request.state is State.VERIFYING]
        if not going_on:  # prompts alone
            return
        self.micro_batches.begin(going_on, now)
        if ahead.plans:
            self.planned_ahead.begin(ahead, going_on, running)
            return
        self.planned_ahead.planner.rest(going_on, running)


@contextmanager
def _read_on(requests: Sequence[Request], sent: OutstandingVerify) -> Iterator[None]:
    """For a while, these are as if their chunks in the call had been computed."""
    for request in requests:
        request.num_computed += sent.prefilling[request.request_id]
    try:
        yield
    finally:
        for request in requests:
            request.num_computed -= sent.prefilling[request.request_id]


def _goes_on(request: Request, sent: OutstandingVerify) -> bool:
    """Whether the call decides the request's next token, for all that is known."""
    if request.state is State.PREFILL_SENT:
        return request.request_id in sent.ending
    return request.state is State.VERIFYING
