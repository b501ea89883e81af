"""Where a front end learns which cells there are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from cluster.members import Member

#: Where a cell listens, and the token that admits a client: host, port, token.
Endpoint = tuple[str, int, bytes | str]


class CellSource(Protocol):
    """What `CellClients` asks again and again."""

    @property
    def poll_s(self) -> float | None:
        """How often to ask while connected; None: only after a connection was lost."""

    @property
    def are_replaced(self) -> bool:
        """Whether all its cells are gone or leave, and others have taken their place that are none of its."""

    async def cells(self) -> Sequence[Member]:
        """The cells with their endpoints; anything raised is taken for an outage that may pass."""


class LocatedCell:
    """The only cell, wherever it is now (`CellSource`).

    Args:
        locate: finds the cell; a restarted one listens elsewhere.
    """

    poll_s: float | None = None
    are_replaced = False

    def __init__(self, locate: Callable[[], Awaitable[Endpoint]]) -> None:
        self._locate = locate

    async def cells(self) -> Sequence[Member]:
        """See `CellSource`."""
        host, port, token = await self._locate()
        text = token if isinstance(token, str) else token.decode()
        return [Member(kind="cell", id=f"{host}:{port}", node=host, endpoint=(host, port, text))]
