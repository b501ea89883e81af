"""Who has only the time that others leave."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.batching.common import has_objective
from cluster.requests import Request


def is_background(request: Request, urgent: float) -> bool:
    """Whether the request is to have only the time that those with objectives leave.

    It has no objectives, and says by its `priority` that others come first: above 0, which is that of anybody
    who says nothing, and above theirs.

    Args:
        request: whose it is asked of.
        urgent: priority of the most urgent of those.
    """
    priority = request.submit.priority
    return priority > 0 and priority > urgent and not has_objective(request)


def most_urgent(requests: Iterable[Request]) -> float:
    """The lowest priority; of nobody infinite, before whom nobody gives way."""
    return min((request.submit.priority for request in requests), default=float("inf"))
