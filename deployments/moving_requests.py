"""Which requests leave the cell they are at for another, though it has not been lost."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from deployments.cell_connection import CellConnection
from deployments.cell_router import uneven
from deployments.pending_requests import Pending

# A target that is lost is back sooner as a rule; nobody waits there for longer if others serve.
_AWAY_S = 30.0


def to_move(
    pending: Collection[Pending], connections: Collection[CellConnection], now: float
) -> Iterator[Pending]:
    """Those without a token yet at the end of a much longer queue, and all where the target stays away.

    From there each goes once: it may be what ended the target, and is not to end all.

    Args:
        pending: all requests.
        connections: to all cells.
        now: by the event loop.
    """
    there = [one for one in connections if one.is_open and one.member.state == "ready"]
    loads = [connection.load() for connection in there]
    for is_behind in (False, True):
        cell, share = uneven(loads, is_behind=is_behind)
        queued = [one for one in pending if one.waits_at(cell, is_behind=is_behind)]
        yield from reversed(queued[len(queued) - int(share * len(queued)) :])
    away = {one.member.id for one in connections if one.away_s(now) > _AWAY_S} if there else ()
    for request in pending:
        if request.cell in away and not request.has_fled:
            request.has_fled = True
            yield request
