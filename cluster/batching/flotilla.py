"""Our default: stall-free batching in which objectives bound what a step holds, where that saves time.

Chunked prefill is Sarathi-Serve's (OSDI 2024), the deadline of a step is AdaServe's A(r) (EuroSys 2026)
turned around, and prompts are ordered by deadline and length. Without objectives it is the rule `sarathi`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from cluster.admission import Room
from cluster.batching.background import LEAST_BACKGROUND, is_background, may_hold_background, most_urgent
from cluster.batching.base import Admission, BatchContext, Chunk
from cluster.batching.call_time import CallTime
from cluster.batching.common import (
    DECODING,
    arrival_order,
    awaits_drafts,
    batch_limit,
    chunked,
    fill,
    has_objective,
    iteration_s,
    make_room,
    may_leave,
    tokens_left,
    tpot_s,
)
from cluster.batching.slack import INFINITE, MARGIN, Pressure, ahead_s
from cluster.requests import Request, State

# Smaller chunks are not worth their place in a call.
LEAST_CHUNK = 8
# Only prompts wait whose tokens take less than this share of their time if read in so many pieces.
CHEAP_SHARE = 0.8
NUM_PIECES = 8
# A prompt that has waited for so many seconds is computed whatever it costs the others: no queue of prompts
# forms, and short bursts are smoothed.
PROMPT_PATIENCE_S = 0.3
# Nor does it wait longer than the tightest TPOT objective for whose sake it waits allows for so many tokens.
# The work of a prompt is only put off, and who waits for it makes the batches after it larger.
PATIENCE_TOKENS = 2
# Of its time to the first token a prompt waits no larger share for the sake of others.
PATIENCE_SHARE = 0.1
# How much later a deadline counts by the seconds of prefill it still takes: of two prompts that can both be
# in time, the shorter one delays the other less.
LENGTH_WEIGHT = 2.0
# A first token comes at the end of a call, which begins when the one under way has ended.
STEPS_TO_FIRST = 2
# Best-effort requests give way to one whose first token is due within so many steps.
PREEMPT_STEPS = 4

# Requests without objectives have this share of all places whatever it costs the others, or they would
# starve.
BEST_EFFORT_SHARE = 1 / 8


class Flotilla:
    """Deadlines first; prompts in pieces that keep TPOT objectives, if that saves time; best effort last."""

    def admit(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> Admission:
        """By deadline while there is room. Who has objectives is not kept waiting for those who run.

        A queue would make objectives that count from the first token look well kept. A request about to miss
        its first token is made room for at the cost of best-effort ones, each once, and whoever has
        objectives at the cost of the background.
        """
        if not waiting or (len(running) >= context.max_running and not _may_be_made_room(waiting, running)):
            return Admission()
        if not any(map(has_objective, (*running, *waiting))) and _same_priority(waiting):
            return fill(waiting, running, context)
        room = context.room(running)
        admitted: list[Request] = []
        preempted: list[Request] = []
        for request in sorted(waiting, key=lambda r: _order(r, context)):
            if not room.takes(request):
                victims = _give_way(request, [r for r in running if r not in preempted], room, context)
                if not victims:
                    break
                for victim in victims:
                    room.give_back(victim)
                preempted.extend(victims)
            room.take(request)
            admitted.append(request)
        return Admission(admitted, preempted)

    def may_take_place(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> bool:
        """Whether somebody waits for best-effort requests who may be made room for (`TakesPlaces`)."""
        if _has_deadline(waiting) and any(not has_objective(r) and r.num_preemptions == 0 for r in running):
            return True
        return _has_background_behind(waiting, running)

    def held_back(
        self,
        best_effort: Sequence[Request],
        waiting: Sequence[Request],
        running: Collection[Request],
        context: BatchContext,
    ) -> Sequence[Request]:
        """All but as many as the time per token of those with objectives allows, and a few (`HoldsBack`).

        The background is held to more headroom, and but one of it runs whatever it costs the others.
        """
        paced = [r for r in (*running, *waiting) if _can_be_paced(r, context)]
        if not paced:
            return []
        urgent = most_urgent(paced)
        here = [r for r in running if not has_objective(r)]
        num_background = sum(is_background(r, urgent) for r in here)
        num_taken = len(running) + sum(map(has_objective, waiting))
        held: list[Request] = []
        for is_behind, headroom, least in (
            (False, context.headroom, max(1, int(BEST_EFFORT_SHARE * context.max_running))),
            (True, context.background_headroom, LEAST_BACKGROUND),
        ):
            of_kind = [r for r in best_effort if is_background(r, urgent) is is_behind]
            if not of_kind:
                continue
            limit = batch_limit(paced, context, 1.0 - headroom)
            if limit < context.max_running:
                num_here = num_background if is_behind else len(here) - num_background
                most = max(0, least - num_here, limit - num_taken)
                held += of_kind[most:]
                of_kind = of_kind[:most]
            num_taken += len(of_kind)
        return held

    def order(self, request: Request, context: BatchContext) -> tuple[float, ...]:
        """Deadline and length, within a priority level (`OrdersQueue`)."""
        return _order(request, context)

    def decode(
        self, ready: Sequence[Request], members: Collection[Request], context: BatchContext
    ) -> list[Request]:
        """Everybody but the background that would not be admitted now.

        A root is the cheapest token there is, and who sits out has to be served later.
        """
        if not may_hold_background(ready):
            return list(ready)
        paced = [r for r in members if _can_be_paced(r, context)]
        urgent = most_urgent(paced)
        background = sorted((r for r in ready if is_background(r, urgent)), key=arrival_order)
        if not background:
            return list(ready)
        limit = batch_limit(paced, context, 1.0 - context.background_headroom)
        if limit >= context.max_running:
            return list(ready)
        decoding = [r for r in members if r.state in DECODING]
        num_others = len(decoding) - len(background)
        num_here = sum(is_background(r, urgent) for r in decoding) - len(background)
        out = frozenset(background[max(0, LEAST_BACKGROUND - num_here, limit - num_others) :])
        return [request for request in ready if request not in out]

    def verify(
        self, drafted: Sequence[Request], prefilling: Sequence[Request], running: Collection[Request]
    ) -> list[Request]:
        """Everybody who was drafted for."""
        return list(drafted)

    def prefill(
        self,
        prefilling: Sequence[Request],
        verifying: Sequence[Request],
        num_rows: int,
        running: Collection[Request],
        context: BatchContext,
    ) -> list[Chunk]:
        """Prompts by deadline; where pieces save time, in such as keep every TPOT objective of who decodes.

        Elsewhere a prompt waits for nobody: it would be read a call later, for as long, and by then those who
        decode are mostly the same. Once one has waited for its patience, `PROMPT_PATIENCE_S` at most, no
        prompt does; the background has the patience to be read a little at a time.
        """
        if not prefilling or awaits_drafts(verifying, running, context):
            return []
        ordered = sorted(prefilling, key=lambda r: _order(r, context))
        background = _background_of(ordered, running, context)
        behind = frozenset(background)
        others = [request for request in ordered if request not in behind] if behind else ordered
        limit_s = call_limit_s(verifying, num_rows, running, context)
        budget = context.chunk_tokens
        # A little of each call is the background's, or it would hold its place for nothing.
        kept = min(LEAST_CHUNK, tokens_left(background[0]), budget // 2) if background else 0
        budget -= kept
        if limit_s == INFINITE or _is_impatient(others, running, context):
            chunks = chunked(others, budget)
        else:
            chunks = []
            time = CallTime.of(verifying, num_rows, context)
            empty = replace(time)
            for request in (*others, *background):
                left = budget - sum([tokens for _, tokens in chunks])
                if left == 0:
                    break
                most = tokens = min(left, tokens_left(request))
                # In a gap between drafts, what fits into it costs nobody anything.
                if not verifying or request in behind or _pieces_save(empty, request, most):
                    tokens = time.most_tokens(request, most, limit_s / MARGIN)
                if tokens == 0 or tokens < min(LEAST_CHUNK, most):
                    continue
                time.add(request, tokens, is_chunk=True)
                chunks.append((request, tokens))
        if background and not any(request in behind for request, _ in chunks):
            left = budget + kept - sum([tokens for _, tokens in chunks])
            chunks += chunked(background[:1], min(left, LEAST_CHUNK))
        return chunks


def _pieces_save(empty: CallTime, request: Request, num_tokens: int) -> bool:
    """Whether tokens of a prompt take less time a few to a call than so many in one.

    They do where rows up to the roofline's knee are nearly free, as on a GPU beside few that decode.

    Args:
        empty: the call without any prompt, as later ones are taken to be.
        request: the prompt's.
        num_tokens: of its prompt, that the call could take.
    """
    few = max(LEAST_CHUNK, num_tokens // NUM_PIECES)
    if few >= num_tokens:
        return False
    without_s = empty.seconds()
    few_s = (empty.seconds_with(request, few) - without_s) / few
    all_s = (empty.seconds_with(request, num_tokens) - without_s) / num_tokens
    return few_s < CHEAP_SHARE * all_s


def _is_impatient(prefilling: Sequence[Request], running: Collection[Request], context: BatchContext) -> bool:
    """Whether a prompt has waited as long as it does, at most, so that nobody's TPOT objective is broken."""
    waited_s = [(context.now - request.arrived, request.pace.ttft_ms) for request in prefilling]
    tightest_s = min((tpot_s(r) for r in running if r.state in DECODING), default=INFINITE)
    patience_s = min(PROMPT_PATIENCE_S, PATIENCE_TOKENS * tightest_s)
    return any(
        waited >= (patience_s if ttft_ms is None else min(patience_s, PATIENCE_SHARE * ttft_ms / 1e3))
        for waited, ttft_ms in waited_s
    )


def call_limit_s(
    verifying: Sequence[Request], num_rows: int, running: Collection[Request], context: BatchContext
) -> float:
    """Longest that the next verify call may take, by the TPOT objectives of all who decode.

    A request whose tree is in the call gets its tokens at its end; another's come no earlier than a call
    later, for which the draft it waits for may leave time. With nobody decoding there is no limit.
    """
    in_call = {request.request_id for request in verifying}
    later = [r for r in running if r.state in DECODING and r.request_id not in in_call]
    if not verifying and not any(r.state is State.DRAFTING for r in later):
        return INFINITE  # the target would be idle
    least_s = MARGIN * CallTime.of(verifying, num_rows, context).seconds() if verifying else 0.0
    limit_s = INFINITE
    for request in verifying:
        limit_s = min(limit_s, Pressure.of(request, context).limit_s(least_s))
    if later and _has_tpot(later):
        next_s = MARGIN * CallTime.of(later, round(len(later) * context.num_rows), context).seconds()
        first_s = max(least_s, context.draft_left_s)
        for request in later:
            until_s = Pressure.of(request, context).limit_s(first_s + next_s) - next_s
            if not verifying and until_s < INFINITE:
                until_s = context.draft_left_s
            limit_s = min(limit_s, max(until_s, context.draft_left_s))
    return limit_s


def _order(request: Request, context: BatchContext) -> tuple[int, float, int]:
    """Earliest deadline first within a priority level; each `ageing_s` of waiting lifts by one level.

    The deadline is when the first token must be there (or, of a preempted request, the next one), put off by
    what is left of the prefill: among equal deadlines the shortest prompt is next, as most are then in time
    when not all can be. Who has no deadline, or cannot meet it any more, has until `ageing_s`.
    """
    waited_s = context.now - request.arrived - request.ran_s
    level = request.submit.priority - int(waited_s / context.ageing_s)
    deadline_s = _deadline_s(request, context.now)
    left_s = tokens_left(request) * context.prompt_token_s
    if deadline_s == INFINITE or deadline_s < left_s + STEPS_TO_FIRST * context.step_s:
        return (level, context.ageing_s - waited_s, request.order)
    return (level, deadline_s + LENGTH_WEIGHT * left_s, request.order)


def _deadline_s(request: Request, now: float) -> float:
    """Seconds left until the request's next token is due; negative if it is late, infinite if never."""
    if request.first_token_at is not None:
        return INFINITE if tpot_s(request) == INFINITE else tpot_s(request) + ahead_s(request, now)
    ttft_ms = request.pace.ttft_ms
    return INFINITE if ttft_ms is None else request.arrived + ttft_ms / 1e3 - now


def _give_way(
    request: Request, running: Collection[Request], room: Room, context: BatchContext
) -> list[Request]:
    """Who is preempted for one that has no room: the least urgent first, and of these the latest.

    The background for anybody with objectives, other best-effort requests for one that would otherwise miss
    its deadline.
    """
    if not has_objective(request):
        return []
    prefill_s = tokens_left(request) * context.prompt_token_s
    is_due = 0.0 <= _deadline_s(request, context.now) - prefill_s <= PREEMPT_STEPS * context.step_s
    urgent = request.submit.priority
    background = sorted((r for r in running if is_background(r, urgent)), key=arrival_order)
    going_on = frozenset(background[:LEAST_BACKGROUND])
    victims = [
        other
        for other in running
        if not has_objective(other)
        and not context.comes_first(other, request)
        and may_leave(other, context)
        and (
            (is_background(other, urgent) and other not in going_on) or (is_due and not other.num_preemptions)
        )
    ]
    return make_room(request, _least_urgent_first(victims, context), room)


def _least_urgent_first(requests: Sequence[Request], context: BatchContext) -> list[Request]:
    """By priority, then the latest; whose turn it is of several tenants is said by their tiers."""
    ordered = sorted(requests, key=arrival_order)
    own: dict[str, list[Request]] = {}
    for one in ordered:
        own.setdefault(one.submit.tenant.label, []).append(one)
    if len(own) <= 1:
        return ordered[::-1]
    of_tier = context.tier_priorities
    turns = sorted(requests, key=lambda r: (of_tier.get(r.submit.tier, 0), r.order), reverse=True)
    return [own[turn.submit.tenant.label].pop() for turn in turns]


def _can_be_paced(request: Request, context: BatchContext) -> bool:
    """Whether the request has a TPOT objective that an average one would keep if nobody else were served."""
    allowed_s = context.num_committed * tpot_s(request)
    return allowed_s < INFINITE and iteration_s(1, request.num_tokens, context) <= allowed_s


def _has_tpot(requests: Collection[Request]) -> bool:
    return any(request.pace.tpot_ms is not None for request in requests)


def _background_of(
    requests: Sequence[Request], running: Collection[Request], context: BatchContext
) -> list[Request]:
    """Those of them that are in the background of somebody who decodes."""
    if not may_hold_background(requests):
        return []
    urgent = most_urgent(r for r in running if r.state in DECODING and _can_be_paced(r, context))
    return [request for request in requests if is_background(request, urgent)]


def _may_be_made_room(waiting: Sequence[Request], running: Collection[Request]) -> bool:
    return _has_deadline(waiting) or _has_background_behind(waiting, running)


def _has_background_behind(waiting: Sequence[Request], running: Collection[Request]) -> bool:
    """Whether some of the background could give way to one who waits."""
    urgent = most_urgent(filter(has_objective, waiting))
    return sum(is_background(request, urgent) for request in running) > LEAST_BACKGROUND


def _has_deadline(waiting: Collection[Request]) -> bool:
    return any(r.pace.ttft_ms is not None or r.first_token_at is not None for r in waiting)


def _same_priority(waiting: Sequence[Request]) -> bool:
    return waiting[0].submit.priority == waiting[-1].submit.priority
