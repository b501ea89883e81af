"""What several batching rules share: filling up by order, chunked and whole prompts, a batch limit by SLO."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from cluster.admission import Room
from cluster.batching.base import Admission, BatchContext, Chunk
from cluster.requests import Request, State

# In these states the target is working on the request, so its KV is not taken away.
IN_CALL = (State.VERIFYING, State.PREFILL_SENT)
# In these its prompt has been read.
DECODING = (State.READY, State.DRAFTING, State.DRAFTED, State.VERIFYING)


def may_leave(request: Request, context: BatchContext) -> bool:
    """Whether a running request may be preempted: the target is not working on it."""
    return context.is_answered or request.state not in IN_CALL


def arrival_order(request: Request) -> tuple[int, int]:
    """First come, first served within each of the request's own priority levels (lower is earlier)."""
    return (request.submit.priority, request.order)


def has_objective(request: Request) -> bool:
    """Whether the request has objectives; one without is served as well as can be."""
    return request.pace.tpot_ms is not None or request.pace.ttft_ms is not None


def tpot_s(request: Request) -> float:
    """The request's TPOT objective in seconds; infinite without one."""
    tpot_ms = request.pace.tpot_ms
    return float("inf") if tpot_ms is None else tpot_ms / 1e3


def fill(
    ordered: Iterable[Request], running: Collection[Request], context: BatchContext, limit: int | None = None
) -> Admission:
    """Admit in the given order until one has no room, or `limit` requests run; nobody passes that one."""
    room = context.room(running, limit)
    admitted = []
    for request in ordered:
        if not room.takes(request):
            break
        room.take(request)
        admitted.append(request)
    return Admission(admitted)


def make_room(request: Request, candidates: Iterable[Request], room: Room) -> list[Request]:
    """The first of the candidates, as many as must give way for the request to fit; none if in vain."""
    trial, victims = room.copy(), []
    for victim in candidates:
        trial.give_back(victim)
        victims.append(victim)
        if trial.takes(request):
            return victims
    return []


def tokens_left(request: Request) -> int:
    """Tokens still to prefill; the last known token is computed with the final chunk, so at least one."""
    return max(1, request.num_tokens - request.num_computed)


def chunked(ordered: Iterable[Request], budget: int) -> list[Chunk]:
    """Chunked prefill: at most `budget` prompt tokens, in the given order."""
    chunks = []
    for request in ordered:
        if budget <= 0:
            break
        tokens = min(budget, tokens_left(request))
        chunks.append((request, tokens))
        budget -= tokens
    return chunks


def whole_prompts(ordered: Sequence[Request], budget: int) -> list[Chunk]:
    """Prompts uncut: the first whatever its length, then as many as stay within `budget` tokens in all."""
    chunks: list[Chunk] = []
    for request in ordered:
        tokens = tokens_left(request)
        if chunks and tokens > budget:
            break
        chunks.append((request, tokens))
        budget -= tokens
    return chunks


def first_few(
    ready: Sequence[Request],
    members: Collection[Request],
    context: BatchContext,
    key: Callable[[Request], tuple[float, ...]],
) -> list[Request]:
    """The first by `key` of those ready, as many as the batch limit leaves beside those drafted already."""
    drafted = sum(request.state is State.DRAFTED for request in members)
    places = batch_limit(members, context) - drafted
    if places >= len(ready):
        return list(ready)
    return sorted(ready, key=key)[: max(0, places)]


def iteration_s(count: int, num_context: float, context: BatchContext) -> float:
    """Predicted seconds of an iteration in which so many decode, of so many tokens each."""
    rows = round(count * context.num_rows)
    # Forwards after drafting are corrected apart: they take longer than their rows alone say.
    drafted = rows > count
    return context.beside_s + context.cost.verify_seconds(
        count, rows, round(count * num_context), drafted=drafted
    )


def batch_limit(requests: Collection[Request], context: BatchContext, share: float = 1.0) -> int:
    """Largest batch in which an iteration keeps the strictest TPOT objective of `requests`; at least 1.

    AdaServe's v1 evaluation says of its scheduling baselines that they adjust "batch size limits to
    accommodate TPOT SLOs"; how is not said. Here: the predicted seconds of an iteration over the tokens
    it yields per request are compared with the strictest objective. Without any objective there is no
    limit but `max_running`.

    Args:
        requests: whose objectives and lengths count.
        context: of the step.
        share: of the strictest objective that an iteration may take.
    """
    strictest_s = min(map(tpot_s, requests), default=float("inf"))
    if strictest_s == float("inf"):
        return context.max_running
    num_context = sum(request.num_tokens for request in requests) / len(requests)
    most_s = share * strictest_s * context.num_committed
    limit = 1
    while limit < context.max_running:
        if iteration_s(limit + 1, num_context, context) > most_s:
            break
        limit += 1
    return limit


def awaits_drafts(
    verifying: Collection[Request], running: Collection[Request], context: BatchContext
) -> bool:
    """Whether trees will follow soon and none is ready: prompts then join them in one forward.

    A forward of prompts alone makes those whose drafts come meanwhile wait for all of it, and reads the
    target's weights once more; a stall-free step has chunks beside decodes (Sarathi-Serve). With several
    micro-batches the target is to be busy while others draft, and prompts fill its gaps.
    """
    if verifying or context.overlaps:
        return False
    return any(request.state is State.DRAFTING for request in running)
