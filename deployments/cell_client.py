"""A connection to one cell that is found by asking for it: one TCP stream, kept up across cell restarts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from cluster.members import Member
from deployments.cell_clients import CellClients
from deployments.pending_requests import CellLost, RequestRejected

__all__ = ["CellClient", "CellLost", "Endpoint", "RequestRejected"]

#: Where a cell listens, and the token that admits a client: host, port, token.
Endpoint = tuple[str, int, bytes | str]


class LocatedCell:
    """The only cell, wherever it is now (`cell_clients.CellSource`).

    Args:
        locate: finds the cell; a restarted one listens elsewhere.
    """

    poll_s: float | None = None

    def __init__(self, locate: Callable[[], Awaitable[Endpoint]]) -> None:
        self._locate = locate

    async def cells(self) -> Sequence[Member]:
        """See `CellSource`."""
        host, port, token = await self._locate()
        text = token if isinstance(token, str) else token.decode()
        return [Member(kind="cell", id=f"{host}:{port}", node=host, endpoint=(host, port, text))]


class CellClient(CellClients):
    """`CellClients` of one cell: after a loss it asks `locate` again, reconnects, and resubmits.

    Args:
        locate: finds the cell; called for each attempt to connect.
        give_up_after_s: how long a loss may last before waiting requests end with `CellLost`.
    """

    def __init__(self, locate: Callable[[], Awaitable[Endpoint]], *, give_up_after_s: float = 120.0) -> None:
        super().__init__(LocatedCell(locate), give_up_after_s=give_up_after_s)
