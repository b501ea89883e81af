"""A connection to one cell that is found by asking for it: one TCP stream, kept up across cell restarts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from deployments.cell_clients import CellClients
from deployments.cell_source import Endpoint, LocatedCell
from deployments.pending_requests import CellLost, RequestRejected

__all__ = ["CellClient", "CellLost", "Endpoint", "RequestRejected"]


class CellClient(CellClients):
    """`CellClients` of one cell: after a loss it asks `locate` again, reconnects, and resubmits.

    Args:
        locate: finds the cell; called for each attempt to connect.
        give_up_after_s: how long a loss may last before waiting requests end with `CellLost`.
    """

    def __init__(self, locate: Callable[[], Awaitable[Endpoint]], *, give_up_after_s: float = 120.0) -> None:
        super().__init__(LocatedCell(locate), give_up_after_s=give_up_after_s)
