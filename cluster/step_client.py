"""The scheduler's end of the step transport: one persistent connection per worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from cluster.transport import read_frame, write_frame

_log = logging.getLogger(__name__)


class StepClient:
    """Sends calls to one worker and hands its answers on as they come; notices its death at once."""

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_answer: Callable[[bytes], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.name = name
        self._writer = writer
        self._closing = False
        self._task = asyncio.create_task(self._pump(reader, on_answer, on_lost), name=f"steps of {name}")

    @classmethod
    async def connect(
        cls,
        name: str,
        address: tuple[str, int],
        token: bytes,
        on_answer: Callable[[bytes], None],
        on_lost: Callable[[], None],
    ) -> StepClient:
        """Connect and present the token; OSError if the worker is not there."""
        reader, writer = await asyncio.open_connection(*address)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        write_frame(writer, token)
        return cls(name, reader, writer, on_answer, on_lost)

    def send(self, call: bytes) -> None:
        """Queue one call."""
        write_frame(self._writer, call)

    async def close(self) -> None:
        """Close without reporting a loss."""
        self._closing = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, on_answer: Callable[[bytes], None], on_lost: Callable[[], None]
    ) -> None:
        try:
            while True:
                on_answer(await read_frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            _log.warning("connection to %s lost", self.name)
        except Exception:
            # Without this nobody would read on, and every request would wait forever: better a new worker.
            _log.exception("an answer of %s could not be handled; it counts as lost", self.name)
        if not self._closing:
            on_lost()
