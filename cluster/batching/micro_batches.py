"""Forming micro-batches: which one a request joins, and which one the target verifies next (SPIN, 2025)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from cluster.requests import Request, State


def emptiest(running: Iterable[Request], num_micro_batches: int) -> int:
    """Index of the micro-batch with the fewest members, the first of them."""
    sizes = [0] * num_micro_batches
    for request in running:
        sizes[request.micro_batch] += 1
    return sizes.index(min(sizes))


def members(running: Iterable[Request]) -> dict[int, list[Request]]:
    """Running requests by micro-batch."""
    by_batch: dict[int, list[Request]] = defaultdict(list)
    for request in running:
        by_batch[request.micro_batch].append(request)
    return by_batch


def ready_to_draft(of_batch: Iterable[Request]) -> list[Request]:
    """Members that may begin an iteration; none while another member is in the middle of one."""
    ready = []
    for request in of_batch:
        if request.state in (State.DRAFTING, State.VERIFYING):
            return []
        if request.state is State.READY:
            ready.append(request)
    return ready


def drafted_longest_ago(
    by_batch: Mapping[int, list[Request]], started: Mapping[int, float], now: float
) -> list[Request]:
    """Members to verify of the complete micro-batch that began its iteration first: it has waited longest.

    A micro-batch is complete when drafts are in for all its members that were drafted for.
    """
    candidates: list[tuple[float, int]] = []
    for micro_batch, of_batch in by_batch.items():
        states = {request.state for request in of_batch}
        if State.DRAFTED in states and State.DRAFTING not in states:
            candidates.append((started.get(micro_batch, now), micro_batch))
    if not candidates:
        return []
    return [r for r in by_batch[min(candidates)[1]] if r.state is State.DRAFTED]
