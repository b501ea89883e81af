"""Who has only the time that others leave."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.batching.common import has_objective
from cluster.requests import Request

#: Of who says nothing of its urgency.
USUAL_PRIORITY = 0


def is_background(request: Request, urgent: float) -> bool:
    """Whether the request is to have only the time that those with objectives leave.

    It has no objectives, and says by its `priority` that others come first: above the usual 0, and
    above theirs.

    Args:
        request: whose it is asked of.
        urgent: priority of the most urgent of those.
    """
    return request.submit.priority > max(USUAL_PRIORITY, urgent) and not has_objective(request)


def most_urgent(requests: Iterable[Request]) -> float:
    """The lowest priority; of nobody infinite, before whom nobody gives way."""
    return min((request.submit.priority for request in requests), default=float("inf"))
