"""How long HTTP clients may take: to send a request, to read its answer, and from end to end.

uvicorn bounds what it holds for a client that does not read: past 64 KiB the response waits, and with it the
generator behind it. But it waits for ever, as it does for headers that never end; both end here.

A request may be answered before its body has come, as one that is too large is. What still comes of the body
is read and dropped for a while: closed at once, the connection would be reset, and the answer lost with it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from cluster.http_config import HttpConfig
from deployments.last_requests import EndingProtocol

_LAST_WORDS = b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout" + _LAST_WORDS
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large" + _LAST_WORDS

_CONTINUE = b"HTTP/1.1 100 "
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"

#: uvicorn's parser takes headers of any length.
MOST_HEADER_BYTES = 1 << 16

#: Of a body whose request is answered already, so many bytes more than `http.max_body_bytes` are dropped.
DRAINED_BYTES = 16 << 20


class _Parser(httptools.HttpRequestParser):
    """One to which a request that asks for another protocol is like any other (RFC 9110, 7.8).

    The plain one takes a body for that protocol; Java's client and curl ask for HTTP/2 with such requests.

    Args:
        protocol: is told the parts.
        plain_head: the head of the request at hand, as it is if nothing is asked for.
    """

    def __init__(self, protocol: Any, plain_head: Callable[[], bytes]) -> None:
        super().__init__(protocol)
        self._plain_head = plain_head

    def feed_data(self, data: Any) -> None:
        """Bytes came."""
        rest = memoryview(data)
        while True:
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            super().feed_data(self._plain_head())


class _Part(Enum):
    """Which part of a request the next byte belongs to."""

    NONE = auto()
    HEADERS = auto()
    BODY = auto()


class _LingeringTransport(asyncio.Transport):
    """Where an answer goes: closed, it has the connection closed once the request's body has come."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        super().__init__()
        self._transport, self._close = transport, close

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """To the client."""
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection itself is."""
        return self._transport.is_closing()

    def close(self) -> None:
        """No more is written."""
        self._close()


class _UnframedTransport(_LingeringTransport):
    """The same to a client of HTTP/1.0, which knows no chunks: a body ends with the connection.

    uvicorn sends it chunks all the same; each write is a head or some of them, whole.
    """

    _is_head = True
    _has_chunks = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """To the client."""
        rest = bytes(data)
        if self._is_head:
            self._is_head, self._has_chunks = rest.startswith(_CONTINUE), _CHUNKED in rest
            rest = rest.replace(_CHUNKED, b"\r\n")
        elif self._has_chunks:
            rest = _without_frames(rest)
        self._transport.write(rest)


def _without_frames(chunks: bytes) -> bytes:
    """What whole chunks hold."""
    found = []
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        end = int(size, 16)
        found.append(rest[:end])
        chunks = rest[end + 2 :]
    return b"".join(found)


async def _headers_too_large(scope: Scope, receive: Receive, send: Send) -> None:
    """What answers a request whose headers are complete, and too long."""
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 431, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def timed_protocol(http: HttpConfig, goes_on: Callable[[], bool] = lambda: True) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which hangs up on clients that send or read too slowly.

    Of its two it is the one whose parser says where a message's parts begin and end. `goes_on`: see
    `EndingProtocol`.
    """
    most_drained = http.max_body_bytes + DRAINED_BYTES

    class TimedProtocol(EndingProtocol):
        """One connection."""

        _part = _Part.NONE
        _num_header_bytes = 0
        _num_drained_bytes = 0
        _num_bodiless_bytes = 0
        _closes_after_body = False
        _read_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """A client connected: its headers are awaited."""
            self.goes_on = goes_on
            super().connection_made(transport)
            self.parser = _Parser(self, self._plain_head)
            self._cycles: deque[RequestResponseCycle] = deque()
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            """Bytes came."""
            if self._part is not _Part.BODY:
                self._num_header_bytes += len(data)
            else:
                self._num_drained_bytes += len(data) if self.is_answered() else 0
                self._num_bodiless_bytes += len(data)
            super().data_received(data)
            if self.transport.is_closing():
                return
            if self._part is _Part.BODY:
                if self.is_answered() and self._num_drained_bytes > most_drained:
                    self.transport.close()
                elif self._num_bodiless_bytes > MOST_HEADER_BYTES:
                    self.transport.abort()  # trailers, or chunks' extensions, that the parser would keep
            elif self._num_header_bytes > MOST_HEADER_BYTES:
                self._hang_up(_TOO_LARGE)
            elif self.is_answered() and self._read_timer is None:
                if self._part is _Part.HEADERS:
                    self._await_headers()
                elif self.timeout_keep_alive_task is None:
                    # uvicorn started it with the answer, and stopped it though no request began.
                    self.timeout_keep_alive_task = self.loop.call_later(
                        self.timeout_keep_alive, self.timeout_keep_alive_handler
                    )

        def on_message_begin(self) -> None:
            """A request begins."""
            self._part = _Part.HEADERS
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            """A header; a trailer is none, whoever it names (RFC 9110, 6.5.1), and is passed over."""
            if self._part is not _Part.BODY:
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            """A piece of a request's body."""
            self._num_bodiless_bytes = 0
            super().on_body(body)

        def on_headers_complete(self) -> None:
            """A request is known but for its body."""
            if self.transport.is_closing():
                return  # the request before was the last one, and only its body was still awaited
            if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
                return  # it is read again
            # As a read may bring them all at once, the count of bytes that were read may not have told.
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > MOST_HEADER_BYTES:
                # `parse_url` takes no more than 64 KiB either, and this answers for every URL.
                self.app, self.url = _headers_too_large, b"/"
            super().on_headers_complete()
            while self._cycles and self._cycles[0].response_complete:
                self._cycles.popleft()
            self._cycles.append(self.cycle)
            self._part = _Part.BODY
            self._num_header_bytes = self._num_drained_bytes = self._num_bodiless_bytes = 0
            self._stop_reading()
            is_old = self.parser.get_http_version() == "1.0"
            kind = _UnframedTransport if is_old else _LingeringTransport
            self.cycle.transport = kind(self.transport, self._close_after_body)
            announced = dict(self.headers).get(b"content-length", b"")
            if announced.isdigit() and int(announced) > most_drained:
                self.cycle.keep_alive = False

        def on_message_complete(self) -> None:
            """A request's body is complete."""
            if self._part is _Part.HEADERS:
                return  # it is read again
            self._part = _Part.NONE
            super().on_message_complete()
            if self.is_answered():
                self._stop_reading()
            if self._closes_after_body:
                self.transport.close()

        def on_response_complete(self) -> None:
            """An answer is complete; what is left of its request's body must come in time too."""
            super().on_response_complete()
            if self._part is _Part.BODY and self.is_answered() and not self.transport.is_closing():
                self._read_timer = self.loop.call_later(http.read_timeout_s, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            """The connection ended."""
            self._stop_reading()
            self._stop_writing()
            # uvicorn tells the request that came last, and not the one that is being answered before it.
            for cycle in self._cycles:
                cycle.disconnected = not cycle.response_complete
                cycle.message_event.set()
            super().connection_lost(exc)

        def is_sending(self) -> bool:
            """Whether a request has begun to come and is not complete."""
            return self._part is not _Part.NONE

        def pause_writing(self) -> None:
            """The client has not read what fills the buffer."""
            super().pause_writing()
            self._write_timer = self.loop.call_later(http.write_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            """The client has read on."""
            self._stop_writing()
            super().resume_writing()

        def _plain_head(self) -> bytes:
            """That of the request at hand, without what asks for another protocol."""
            line = b"%s %s HTTP/%s" % (
                self.parser.get_method(),
                self.url,
                self.parser.get_http_version().encode(),
            )
            headers = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
            return b"\r\n".join([line, *headers, b"", b""])

        def _await_headers(self) -> None:
            self._read_timer = self.loop.call_later(http.read_timeout_s, self._read_timed_out)

        def _read_timed_out(self) -> None:
            self._read_timer = None
            self._hang_up(_TIMED_OUT)

        def _hang_up(self, last_words: bytes) -> None:
            if not self.is_answered():
                self.transport.abort()  # words would come in the midst of an answer
            elif not self.transport.is_closing():
                self.transport.write(last_words)
                self.transport.close()

        def _close_after_body(self) -> None:
            if self._part is _Part.BODY and self.is_answered():
                self._closes_after_body = True
            else:
                self.transport.close()

        def _stop_reading(self) -> None:
            if self._read_timer is not None:
                self._read_timer.cancel()
                self._read_timer = None

        def _stop_writing(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

    return TimedProtocol


class _ServerConfig(Config):
    """uvicorn's, for TLS with a context that is made elsewhere."""

    def __init__(self, app: ASGIApp, context: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(app, **options)
        self._context = context

    def load(self) -> None:
        """Called before it serves."""
        super().load()
        self.ssl = self._context


def server_config(
    app: ASGIApp,
    http: HttpConfig,
    context: ssl.SSLContext | None = None,
    goes_on: Callable[[], bool] = lambda: True,
) -> Config:
    """uvicorn as front ends run it: quiet, with limits, with TLS where there is a context for it.

    `goes_on`: see `EndingProtocol`.
    """
    return _ServerConfig(
        app,
        context,
        # uvicorn's own would have `logging` close every handler of the process, that of Ray Serve's log too,
        # which from then on writes nothing and keeps each line in memory.
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        http=timed_protocol(http, goes_on),
        ws="none",
        server_header=False,
    )
