"""The worker's end of the step transport: one blocking thread, one connection, one answer per call.

A thread of its own with blocking sockets has the lowest latency Python offers, and leaves the actor's
own calls (lifecycle, control) free to be answered while a step is computed.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection

from cluster.core_affinity import KeptThread, usable_cores
from cluster.transport import BUSY_POLLING_S, MAX_CALL_BYTES, TOKEN_S
from cluster.worker_lease import UNACKNOWLEDGED_S

_LENGTH = struct.Struct(">I")
_log = logging.getLogger(__name__)


class StepServer:
    """Answers framed calls on a TCP port, for one scheduler at a time.

    Args:
        handle: turns a call's bytes into the answer's bytes; runs in the server's thread.
        idle: a short piece of work to do while no call is waiting, in the same thread, until it returns
            False or the next call comes. A call waits for the piece that is running.
        token: secret the other side must send as its first frame.
        host: address to listen on.
        heartbeat_s: an empty frame is sent this often, as a sign of life, from a thread of its own: also
            while a call is computed. 0 sends none.
        token_s: whoever has not sent its token by then is cut off, so that the next one is heard.
        busy_polling: whether it looks for the next call without pause for a while after an answer.
    """

    def __init__(
        self,
        handle: Callable[[bytes], bytes],
        token: bytes,
        host: str,
        idle: Callable[[], bool] | None = None,
        heartbeat_s: float = 0.0,
        token_s: float = TOKEN_S,
        busy_polling: bool = False,
    ) -> None:
        self._handle = handle
        self._busy_s = BUSY_POLLING_S if busy_polling else 0.0
        self._token_s = token_s
        self._heartbeat_s = heartbeat_s
        self._sending = threading.Lock()
        self._idle = idle
        self._token = token
        self._kept: KeptThread | None = None
        # Of the connection that is answered, and its call that came while another was computed.
        self._connection: socket.socket | None = None
        self._next: bytes | None = None
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        #: Whether a scheduler's connection stands.
        self.is_connected = False
        # Guards the two below: whoever connects is either admitted before `close`, or ended by it.
        self._admitting = threading.Lock()
        self._is_closed = False
        self._unproven: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="step-server", daemon=True)
        self._thread.start()

    def keep_to(self, cores: Collection[int]) -> None:
        """Have calls answered on these processor cores only, while heartbeats can see that it gets them."""
        if self._thread.native_id is not None and self._heartbeat_s:
            self._kept = KeptThread(self._thread.native_id, cores, usable_cores())

    def waiting(self) -> bytes | None:
        """The call after the one that `handle`, which asks, computes, if it has come: it is answered next."""
        if self._next is None and self._connection is not None and _has_data(self._connection):
            # Whose connection has ended is told so when its answer is sent.
            with contextlib.suppress(OSError, EOFError):
                self._next = _read(self._connection)
        return self._next

    def close(self, within_s: float = 0.0) -> bool:
        """Stop accepting; the thread ends with its connection. Whether it has, after at most `within_s`.

        A connection that has not shown the token is ended, too.
        """
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # else who waits in `accept` would not notice
        self._listener.close()
        with self._admitting:
            self._is_closed = True
            if self._unproven is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    self._unproven.shutdown(socket.SHUT_RDWR)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection:
                _configure(connection)
                try:
                    if self._admit(connection):
                        self._answer(connection)
                # A machine that is gone (`_configure`) is a timeout, or, where its neighbours look for it in
                # vain, "no route to host".
                except (OSError, EOFError) as error:
                    _log.info("scheduler disconnected: %s", error)

    def _admit(self, connection: socket.socket) -> bool:
        """Whether it shows the token in time; only one connection is served, and a port scan is none."""
        with self._admitting:
            if self._is_closed:
                return False
            self._unproven = connection
        is_right = False
        try:
            token = _read(connection, limit=1024, until=time.monotonic() + self._token_s)
            is_right = hmac.compare_digest(token, self._token)
            if not is_right:
                _log.warning("connection with a wrong token refused")
        finally:
            with self._admitting:
                self._unproven = None
                self.is_connected = is_right and not self._is_closed
        connection.settimeout(None)
        return self.is_connected

    def _answer(self, connection: socket.socket) -> None:
        ended = threading.Event()
        if self._heartbeat_s:
            threading.Thread(
                target=self._beat, args=(connection, ended), name="heartbeat", daemon=True
            ).start()
        self._connection, self._next = connection, None
        try:
            while True:
                call, self._next = self._next, None
                answer = self._handle(_read(connection) if call is None else call)
                with self._sending:
                    connection.sendall(_LENGTH.pack(len(answer)) + answer)
                if self._idle is not None:
                    while self._next is None and not _has_data(connection) and self._idle():
                        pass
                until = time.monotonic() + self._busy_s
                while self._next is None and time.monotonic() < until and not _has_data(connection):
                    pass
        finally:
            self._connection = None
            self.is_connected = False
            ended.set()

    def _beat(self, connection: socket.socket, ended: threading.Event) -> None:
        while True:
            try:
                with self._sending:
                    if ended.is_set():
                        return
                    connection.sendall(_LENGTH.pack(0))
            except OSError:
                self.is_connected = False  # whoever answers calls notices, too, after the present one
                return
            if self._kept is not None:
                self._kept.look(time.monotonic())
            ended.wait(self._heartbeat_s)


def _configure(connection: socket.socket) -> None:
    """Send at once, and notice within seconds that the other side's machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * UNACKNOWLEDGED_S))


def _has_data(connection: socket.socket) -> bool:
    ready, _, _ = select.select([connection], [], [], 0.0)
    return bool(ready)


def _read(connection: socket.socket, limit: int = MAX_CALL_BYTES, until: float | None = None) -> bytes:
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size, until))
    if length > limit:
        raise ConnectionError(f"frame of {length} bytes")
    return _read_exactly(connection, length, until)


def _read_exactly(connection: socket.socket, length: int, until: float | None) -> bytes:
    """So many bytes; TimeoutError if they are not there at `until` of the monotonic clock."""
    data = bytearray()
    while len(data) < length:
        if until is not None:  # for all of it: one byte now and then must not hold the port
            connection.settimeout(max(1e-3, until - time.monotonic()))
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError("end of stream")
        data += part
    return bytes(data)
