"""One TCP connection of a front end to one cell, from the attempt to connect until its loss."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from cluster.members import Member
from cluster.stream_messages import CellMessage, ClientMessage
from cluster.transport import read_frame, write_frame
from deployments.cell_router import CellLoad
from engine import wire

_log = logging.getLogger(__name__)

ATTEMPT_TIMEOUT_S = 5.0
#: A cell's report counts requests that were sent this long before it came.
_REPORT_AGE_S = 0.5

_decoder: wire.Decoder[CellMessage] = wire.Decoder(CellMessage)


class CellConnection:
    """Speaks with a cell until the connection is lost, once.

    Args:
        member: the cell; it must have an endpoint.
        on_open: called when requests can be sent.
        on_message: called with every message of the cell.
        on_lost: called once, whether or not it was ever open, unless `close` ended it.
    """

    def __init__(
        self,
        member: Member,
        on_open: Callable[[CellConnection], None],
        on_message: Callable[[CellConnection, CellMessage], None],
        on_lost: Callable[[CellConnection], None],
    ) -> None:
        self.member = member
        self.was_open = False
        self.missing_since: float | None = None
        self._on_open = on_open
        self._on_message = on_message
        self._on_lost = on_lost
        self._writer: asyncio.StreamWriter | None = None
        self._sent: deque[tuple[float, int]] = deque()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"cell {member.id}")

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent right now."""
        return self._writer is not None

    def send(self, message: ClientMessage) -> None:
        """Send, if it is open; a write to a dead connection is lost, which its reader notices."""
        if self._writer is not None:
            write_frame(self._writer, wire.encode(message))

    def note_sent(self, num_tokens: int) -> None:
        """A request of so many tokens went there."""
        self._sent.append((asyncio.get_running_loop().time(), num_tokens))

    def load(self) -> CellLoad:
        """The cell's load as reported, and what was sent since."""
        oldest = asyncio.get_running_loop().time() - _REPORT_AGE_S
        while self._sent and self._sent[0][0] < oldest:
            self._sent.popleft()
        return CellLoad.of(self.member, len(self._sent), sum(tokens for _, tokens in self._sent))

    async def close(self) -> None:
        """End it; `on_lost` is not called."""
        self._on_lost = _ignore
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def abort(self) -> None:
        """End it as if it had been lost."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._task.cancel()

    async def _run(self) -> None:
        assert self.member.endpoint is not None
        host, port, token = self.member.endpoint
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
                reader, opened = await asyncio.open_connection(host, port)
            writer = opened
            write_frame(opened, token.encode())
            self._writer, self.was_open = opened, True
            self._on_open(self)
            while True:
                self._on_message(self, _decoder.decode(await read_frame(reader)))
        except (OSError, EOFError, TimeoutError) as error:
            _log.log(
                logging.WARNING if self.was_open else logging.DEBUG,
                "connection to cell %s at %s:%d lost: %r",
                self.member.id,
                host,
                port,
                error,
            )
        except Exception:  # whatever it is, a new connection is the way out
            _log.exception("connection to cell %s ended", self.member.id)
        finally:
            self._writer = None
            if writer is not None:
                writer.close()
            self._on_lost(self)


def _ignore(_: CellConnection) -> None:
    pass
