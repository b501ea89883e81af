"""Who has only the time that others leave."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cluster.batching.common import DECODING
from cluster.requests import PREFILL, Request, State
from cluster.stream_messages import Objective, Submit

_NOT_IN_STEPS = (State.READY, *PREFILL)

#: Of the background, so many always run.
LEAST_BACKGROUND = 1
#: Of who says nothing of its urgency.
USUAL_PRIORITY = 0


def comes_behind(submit: Submit) -> bool:
    """Whether the request has no objectives, and says by its `priority` that others come first.

    It is in the background of all with objectives who say nothing of their urgency.
    """
    return submit.priority > USUAL_PRIORITY and submit.objective == Objective()


def is_background(request: Request, urgent: float) -> bool:
    """Whether the request is to have only the time that those with objectives leave.

    It comes behind, and its `priority` is above theirs, too.

    Args:
        request: whose it is asked of.
        urgent: priority of the most urgent of those.
    """
    return request.submit.priority > urgent and comes_behind(request.submit)


def is_in_steps(running: Iterable[Request]) -> bool:
    """Whether more of the background takes part in steps now than the one that always does."""
    num_here = sum(comes_behind(r.submit) and r.state not in _NOT_IN_STEPS for r in running)
    return num_here > LEAST_BACKGROUND


def may_hold_background(requests: Iterable[Request]) -> bool:
    """Whether one of them may be in the background of somebody; asked in each step, and mostly not so."""
    return any(request.submit.priority > USUAL_PRIORITY for request in requests)


def most_urgent(requests: Iterable[Request]) -> float:
    """The lowest priority; of nobody infinite, before whom nobody gives way."""
    return min((request.submit.priority for request in requests), default=float("inf"))


def taking_part(running: Collection[Request], beginning: Collection[Request] = ()) -> Collection[Request]:
    """Those who run and do not only hold a place in the background of others.

    Args:
        running: everybody admitted.
        beginning: of those who are ready, who begins a step now.
    """
    if not may_hold_background(running):
        return running
    urgent = most_urgent(r for r in running if r.state in DECODING and r.pace.tpot_ms is not None)
    if urgent == float("inf"):
        return running
    begins = frozenset(beginning)
    return [
        request
        for request in running
        if request.state not in _NOT_IN_STEPS or request in begins or not is_background(request, urgent)
    ]
