"""Ending requests by their ids in every cell, whichever front end sent them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from cluster.stream_messages import CancelMatching, NumCancelled
from deployments.cell_connection import CellConnection


class CancelledEverywhere:
    """Asks all cells, and gathers what they answer."""

    def __init__(self) -> None:
        self._tickets: dict[int, asyncio.Future[int]] = {}
        self._next_ticket = 0

    async def ask(self, connections: Iterable[CellConnection], prefix: str) -> int:
        """How many requests, whose ids begin so, the cells ended; it waits for all of them."""
        tickets: list[int] = []
        answers: list[asyncio.Future[int]] = []
        try:
            for connection in connections:
                self._next_ticket += 1
                tickets.append(self._next_ticket)
                answers.append(asyncio.get_running_loop().create_future())
                self._tickets[self._next_ticket] = answers[-1]
                connection.send(CancelMatching(self._next_ticket, prefix))
            return sum(await asyncio.gather(*answers))
        finally:
            for ticket in tickets:
                self._tickets.pop(ticket, None)

    def answered(self, message: NumCancelled) -> None:
        """A cell has answered."""
        answer = self._tickets.get(message.ticket)
        if answer is not None and not answer.done():
            answer.set_result(message.number)
