"""One TCP connection of a front end to one cell, from the attempt to connect until its loss."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from cluster.members import SILENT_S, Member
from cluster.stream_messages import CellMessage, ClientMessage
from cluster.transport import read_frame, write_frame
from deployments.cell_router import CellLoad
from engine import wire

_log = logging.getLogger(__name__)

ATTEMPT_TIMEOUT_S = 5.0
#: A cell's report counts requests that were sent this long before it came.
_REPORT_AGE_S = 0.5
# Silence must be seen in so many looks that follow each other: this process can have been held up as well,
# and finds only after its first look what came meanwhile.
_LOOKS = 4

_decoder: wire.Decoder[CellMessage] = wire.Decoder(CellMessage)


class CellConnection:
    """Speaks with a cell until the connection is lost, once.

    Args:
        member: the cell; it must have an endpoint.
        on_open: called when requests can be sent.
        on_message: called with every message of the cell.
        on_lost: called once, whether or not it was ever open, unless `close` ended it.
        silent_s: the connection is lost once nothing was heard for so long, not even a sign of life: the cell
            is stopped or stuck, or its machine is cut off. It counts as open only after the first, for the
            kernel accepts connections for a process that is stopped.

    Attributes:
        member: the cell as last heard of.
        was_open: whether it has ever been open.
        was_silent: whether that is why it was lost.
        missing_since: since when the directory has not named the cell.
    """

    def __init__(
        self,
        member: Member,
        on_open: Callable[[CellConnection], None],
        on_message: Callable[[CellConnection, CellMessage], None],
        on_lost: Callable[[CellConnection], None],
        silent_s: float = SILENT_S,
    ) -> None:
        self.member = member
        self.was_open = self.was_silent = False
        self._look_s = silent_s / _LOOKS
        self._was_heard = False
        self._missed = 0
        self.missing_since: float | None = None
        self._away_since: float | None = None
        self._on_open = on_open
        self._on_message = on_message
        self._on_lost = on_lost
        self._writer: asyncio.StreamWriter | None = None
        self._sent: deque[tuple[float, int, bool]] = deque()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"cell {member.id}")

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent right now."""
        return self._writer is not None

    def named(self, member: Member) -> None:
        """The directory has told of the cell as it is now."""
        was, self.member, self.missing_since = self.member.state, member, None
        if member.state != "starting":
            self._away_since = None
        elif was == "ready":
            self._away_since = asyncio.get_running_loop().time()

    def away_s(self, now: float) -> float:
        """For how long the target of the cell, which is there, has been away after it served; else 0."""
        since = self._away_since
        return 0.0 if since is None or not self.is_open else now - since

    def send(self, message: ClientMessage) -> None:
        """Send, if it is open; a write to a dead connection is lost, which its reader notices."""
        if self._writer is not None:
            write_frame(self._writer, wire.encode(message))

    def note_sent(self, num_tokens: int, *, is_behind: bool) -> None:
        """A request went there of which so many tokens are to be read, of the background or not."""
        self._sent.append((asyncio.get_running_loop().time(), num_tokens, is_behind))

    def load(self) -> CellLoad:
        """The cell's load as reported, and what was sent since."""
        oldest = asyncio.get_running_loop().time() - _REPORT_AGE_S
        while self._sent and self._sent[0][0] < oldest:
            self._sent.popleft()
        sent = sum([tokens for _, tokens, _ in self._sent])
        behind = sum([tokens for _, tokens, is_behind in self._sent if is_behind])
        return CellLoad.of(self.member, len(self._sent), sent, behind)

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

    def _watch(self) -> None:
        """Look again and again whether something was heard, until the connection has ended."""
        if self._writer is None:
            return
        self._missed = 0 if self._was_heard else self._missed + 1
        self._was_heard = False
        if self._missed > _LOOKS:
            _log.warning("cell %s gives no sign of life; its requests are moved", self.member.id)
            self.was_silent = True
            self.abort()
            return
        asyncio.get_running_loop().call_later(self._look_s, self._watch)

    async def _run(self) -> None:
        assert self.member.endpoint is not None
        host, port, token = self.member.endpoint
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, port)
                write_frame(writer, token.encode())
                await read_frame(reader)
            self._writer, self.was_open = writer, True
            self._watch()
            self._on_open(self)
            while True:
                data = await read_frame(reader)
                self._was_heard = True
                if data:
                    self._on_message(self, _decoder.decode(data))
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
