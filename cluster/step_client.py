"""The scheduler's end of the step transport: one persistent connection per worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable

from cluster.stalls import Signs
from cluster.transport import read_frame, write_frame

_log = logging.getLogger(__name__)


class StepClient:
    """Sends calls to one worker and hands its answers on as they come; notices its death at once.

    Attributes:
        name: of the worker, for the log.
        is_lost: whether the connection has ended.
    """

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_answer: Callable[[bytes], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.name = name
        self.is_lost = False
        # Calls are answered in order: when those not answered were sent.
        self._sent: deque[float] = deque()
        self._heard_at = self._answered_at = time.monotonic()
        self._num_answered = 0
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
        self._sent.append(time.monotonic())
        write_frame(self._writer, call)

    def signs(self, now: float, predicted_s: float = 0.0) -> Signs:
        """What is known of the worker's process.

        Args:
            now: of the monotonic clock.
            predicted_s: what its oldest call is expected to take.
        """
        return Signs(
            heard_s=now - self._heard_at,
            answered_s=now - self._answered_at,
            # It begins with a call when the one before is answered.
            call_s=now - max(self._sent[0], self._answered_at) if self._sent else None,
            predicted_s=predicted_s,
            num_answered=self._num_answered,
        )

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
                data = await read_frame(reader)
                self._heard_at = time.monotonic()
                if data:  # else a heartbeat
                    self._answered_at = self._heard_at
                    self._num_answered += 1
                    if self._sent:
                        self._sent.popleft()
                    on_answer(data)
        except (asyncio.IncompleteReadError, ConnectionError):
            _log.warning("connection to %s lost", self.name)
        except Exception:
            # Without this nobody would read on, and every request would wait forever: better a new worker.
            _log.exception("an answer of %s could not be handled; it counts as lost", self.name)
        self.is_lost = True
        if not self._closing:
            on_lost()
