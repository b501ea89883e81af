"""What a cell says it did for a request that has ended."""

from __future__ import annotations

from typing import NamedTuple

from cluster.requests import Request
from cluster.stream_messages import Receipt, Terms


def receipt(request: Request, now: float) -> Receipt:
    """The accounts of a request that ends now, in the units of the API."""
    times, submit = _times(request, now), request.submit
    started = request.first_chunk_at if request.first_chunk_at is not None else now
    return Receipt(
        queue_ms=1e3 * (started - request.arrived),
        ttft_ms=_ms(times.first_token_s),
        tpot_ms=_ms(times.token_s),
        e2e_ms=1e3 * times.last_token_s,
        num_prompt_tokens=len(submit.prompt),
        num_cached_tokens=request.num_cached,
        num_output_tokens=len(request.output),
        num_steps=request.num_steps,
        num_drafted=request.num_drafted,
        num_verified=request.num_verified,
        num_accepted=request.num_accepted,
        drafters=dict(request.accepted_by_drafter),
        num_preemptions=request.num_preemptions,
        preempted_ms=(1e3 * request.preempted_s[0], 1e3 * (request.preempted_s[1] + times.lost_s)),
        acceptance_by_depth=list(request.accepted_by_depth),
        min_gap=request.min_gap,
        terms=Terms(tier=submit.tier, objective=submit.objective, priority=submit.priority),
        predicted=request.predicted,
    )


class _Times(NamedTuple):
    """Of the whole request, in seconds; `lost_s` is what it cost that a cell was lost, once it had output."""

    first_token_s: float | None
    token_s: float | None
    last_token_s: float
    lost_s: float = 0.0


def _times(request: Request, now: float) -> _Times:
    resumed, last_at = request.submit.resumed, request.last_token_at
    if resumed is None:
        first_at = request.first_token_at
        first_s = None if first_at is None else first_at - request.arrived
        return _Times(first_s, request.tpot_so_far(), (last_at or now) - request.arrived)
    # Its times so far are on the front end's clock; on this one only what has passed since it was sent.
    came = request.arrived - resumed.sent_s
    last_s = resumed.last_token_s if last_at is None else last_at - came
    next_s = now - came if request.first_token_at is None else request.first_token_at - came
    num_later = len(request.output) - 1
    return _Times(
        first_token_s=resumed.first_token_s,
        token_s=(last_s - resumed.first_token_s) / num_later if num_later else None,
        last_token_s=last_s,
        lost_s=max(0.0, next_s - resumed.last_token_s),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
