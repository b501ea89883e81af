"""The scheduler's end of the step transport: one persistent connection per worker.

Plain sockets on the event loop: asyncio's streams take a further turn of the loop for each answer, and
uvloop, which Ray runs actors on, sends only when the callback that wrote has ended, and what the scheduler
learns from an answer after it has sent the next calls is part of that callback.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable

from cluster.stalls import Signs
from cluster.transport import BUSY_POLLING_S, MAX_CALL_BYTES, frame, take_frames

_log = logging.getLogger(__name__)

_RECEIVE_BYTES = 256 << 10


class StepClient:
    """Sends calls to one worker and hands its answers on as they come; notices its death at once.

    Attributes:
        name: of the worker, for the log.
        is_lost: whether the connection has ended.
    """

    def __init__(
        self,
        name: str,
        connection: socket.socket,
        on_answer: Callable[[bytes], None],
        on_lost: Callable[[], None],
        *,
        busy_polling: bool = False,
    ) -> None:
        self.name = name
        self._busy_s = BUSY_POLLING_S if busy_polling else 0.0
        self._is_polling = False
        self.is_lost = False
        # Calls are answered in order: when those not answered were sent.
        self._sent: deque[float] = deque()
        self._heard_at = self._answered_at = time.monotonic()
        self._num_answered = 0
        self._on_answer, self._on_lost = on_answer, on_lost
        self._connection = connection
        self._closing = False
        self._received, self._unsent = bytearray(), bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._readable)

    @classmethod
    async def connect(
        cls,
        name: str,
        address: tuple[str, int],
        token: bytes,
        on_answer: Callable[[bytes], None],
        on_lost: Callable[[], None],
        *,
        busy_polling: bool = False,
    ) -> StepClient:
        """Connect and present the token; OSError if the worker is not there.

        With `busy_polling` the event loop does not sleep while an answer is to come soon.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        connection = socket.socket(*found[0][:2])
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(connection, found[0][4])
        except BaseException:
            connection.close()
            raise
        client = cls(name, connection, on_answer, on_lost, busy_polling=busy_polling)
        client._write(token)
        return client

    def send(self, call: bytes) -> None:
        """Send one call, at once if the connection takes it."""
        self._sent.append(time.monotonic())
        self._write(call)
        if self._busy_s and not self._is_polling:
            self._poll()

    def _poll(self) -> None:
        """Have the event loop come back at once, and so look at its sockets."""
        self._is_polling = bool(self._sent) and time.monotonic() < self._sent[-1] + self._busy_s
        if self._is_polling:
            self._loop.call_soon(self._poll)

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
        self._end()

    def _write(self, data: bytes) -> None:
        if self._connection.fileno() < 0:
            return
        whole, sent = frame(data, MAX_CALL_BYTES), 0
        if not self._unsent:
            try:
                sent = self._connection.send(whole)
            except BlockingIOError:
                pass
            except OSError as error:
                self._lose(str(error))
                return
            if sent < len(whole):
                self._loop.add_writer(self._connection, self._writable)
        self._unsent += whole[sent:]

    def _writable(self) -> None:
        try:
            sent = self._connection.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._connection)

    def _readable(self) -> None:
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        if not data:
            self._lose("it was closed")
            return
        self._received += data
        try:
            for answer in take_frames(self._received):
                self._hear(answer)
        except ConnectionError as error:
            self._lose(str(error))
        except Exception:
            # Without this nobody would read on, and every request would wait forever: better a new worker.
            _log.exception("an answer of %s could not be handled; it counts as lost", self.name)
            self._lose("")

    def _hear(self, answer: bytes) -> None:
        self._heard_at = time.monotonic()
        if not answer or self._connection.fileno() < 0:  # a heartbeat, or closed while answers were handled
            return
        self._answered_at = self._heard_at
        self._num_answered += 1
        if self._sent:
            self._sent.popleft()
        self._on_answer(answer)

    def _lose(self, why: str) -> None:
        if self._connection.fileno() < 0:
            return
        if why:
            _log.warning("connection to %s lost: %s", self.name, why)
        self._end()
        self.is_lost = True
        # Whoever was about to send must not find the loss told in the midst of it.
        self._loop.call_soon(self._tell_lost)

    def _tell_lost(self) -> None:
        if not self._closing:
            self._on_lost()

    def _end(self) -> None:
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()
