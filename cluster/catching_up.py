"""Drafters catch up on requests whose tokens they have not heard: one call per drafter, and a bounded one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cluster.requests import Request
from drafters.messages import DraftCall

if TYPE_CHECKING:
    from cluster.drafter_pool import DrafterPool


def catch_up(
    pool: DrafterPool, requests: Iterable[Request], now: float, most_s: float
) -> list[tuple[str, DraftCall]]:
    """Calls that let the requests' drafters read what they have not heard, at most one for each drafter.

    While a drafter reads nobody is drafted for by it, so a call takes what can be read in `most_s` together
    with what the drafter is reading already; a drafter that reads nothing reads at least the first request.
    The others are left for later.

    Args:
        pool: whose drafters.
        requests: each has a drafter; those it is reading or has read already, and those of drafters that
            keep nothing, are passed over.
        now: the scheduler's clock.
        most_s: predicted seconds of reading, for each drafter.

    Returns:
        names of drafters, and their calls.
    """
    behind: dict[str, list[Request]] = {}
    for request in requests:
        behind.setdefault(request.drafter, []).append(request)
    calls = []
    for name, mine in behind.items():
        drafter = pool.drafters[name]
        if not drafter.capabilities.needs_prefill:
            continue
        num_tokens = sum(call.num_read for call in drafter.outstanding.values() if call.depth == 0)
        items = []
        for request in mine:
            if request.request_id in drafter.reading:
                continue
            num_unread = drafter.num_unread(request)
            if not num_unread:
                continue
            if num_tokens and pool.costs.rebuild_s(drafter.kind, num_tokens + num_unread) > most_s:
                break
            num_tokens += num_unread
            drafter.reading.add(request.request_id)
            items.append(pool.item_for(request, drafter))
        if items:
            calls.append((name, pool.call(name, items, now)))
    return calls
