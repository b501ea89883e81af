"""How long HTTP clients may take: to send a request, to read its answer, and from end to end.

uvicorn bounds what it holds for a client that does not read: past 64 KiB the response waits, and with it the
generator behind it. But it waits for ever, as it does for headers that never end; both end here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config

from cluster.http_config import HttpConfig
from deployments.errors import ApiError

if TYPE_CHECKING:
    # Which of uvicorn's two is used depends on what is installed; both have what is used here.
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HttpProtocol

_LAST_WORDS = b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout" + _LAST_WORDS
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large" + _LAST_WORDS

#: A server that ends waits so long for a connection's request, as that of Go's `net/http` does for the first.
FIRST_REQUEST_S = 5.0

#: uvicorn's parser takes headers of any length.
MOST_HEADER_BYTES = 1 << 16


def request_timeout(limit_s: float) -> ApiError:
    """A 504 for a request that took longer than the server lets requests take."""
    return ApiError(
        504,
        f"The request took longer than {limit_s:g} s, the server's `http.request_timeout_s`; ask for fewer "
        "tokens.",
        code="deadline_exceeded",
    )


class RequestTimeout:
    """Ends requests that take too long: a 504, or an error event in a stream that has begun."""

    def __init__(self, app: ASGIApp, limit_s: float | None) -> None:
        self._app = app
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or self._limit_s is None:
            await self._app(scope, receive, send)
            return
        started = is_stream = complete = False

        async def noted(message: Message) -> None:
            nonlocal started, is_stream, complete
            if message["type"] == "http.response.start":
                started = True
                kind = dict(message.get("headers", ())).get(b"content-type", b"")
                is_stream = kind.startswith(b"text/event-stream")
            await send(message)
            if message["type"] == "http.response.body":
                complete = not message.get("more_body", False)

        try:
            async with asyncio.timeout(self._limit_s) as limit:
                await self._app(scope, receive, noted)
        except TimeoutError:
            if not limit.expired():
                raise  # somebody else's
            error = request_timeout(self._limit_s)
            if not started:
                await error.response()(scope, receive, send)
            elif is_stream and not complete:
                event = b"event: error\ndata: " + msgspec.json.encode(error.body()) + b"\n\n"
                await send({"type": "http.response.body", "body": event})


def timed_protocol(http: HttpConfig) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, which hangs up on clients that send or read too slowly."""

    class TimedProtocol(HttpProtocol):
        """One connection."""

        _num_header_bytes = 0
        _read_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """A client connected: its headers are awaited."""
            super().connection_made(transport)
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            """Bytes came: headers are complete as soon as there is another request cycle."""
            before = self.cycle
            are_headers = self._is_idle() or not self.cycle.more_body
            if self._read_timer is None and self._is_idle():
                self._await_headers()
            super().data_received(data)
            if self.cycle is not before:
                self._num_header_bytes = 0
                self._stop_reading()
            elif are_headers:
                self._num_header_bytes += len(data)
                if self._num_header_bytes > MOST_HEADER_BYTES:
                    self._hang_up(_TOO_LARGE)

        def connection_lost(self, exc: Exception | None) -> None:
            """The connection ended."""
            self._stop_reading()
            self._stop_writing()
            super().connection_lost(exc)

        def shutdown(self) -> None:
            """The server ends: a client whose headers are awaited may still send them."""
            if self._read_timer is not None and not self.transport.is_closing():
                self.loop.call_later(FIRST_REQUEST_S, super().shutdown)
            else:
                super().shutdown()

        def pause_writing(self) -> None:
            """The client has not read what fills the buffer."""
            super().pause_writing()
            self._write_timer = self.loop.call_later(http.write_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            """The client has read on."""
            self._stop_writing()
            super().resume_writing()

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _await_headers(self) -> None:
            self._read_timer = self.loop.call_later(http.read_timeout_s, self._read_timed_out)

        def _read_timed_out(self) -> None:
            self._read_timer = None
            self._hang_up(_TIMED_OUT)

        def _hang_up(self, last_words: bytes) -> None:
            if not self._is_idle():
                self.transport.abort()  # words would come in the midst of an answer
            elif not self.transport.is_closing():
                self.transport.write(last_words)
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


def server_config(app: ASGIApp, http: HttpConfig) -> Config:
    """uvicorn as front ends run it: quiet, with limits, with TLS where there is a certificate."""
    return Config(
        app,
        # uvicorn's own would have `logging` close every handler of the process, that of Ray Serve's log too,
        # which from then on writes nothing and keeps each line in memory.
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        http=timed_protocol(http),
        ssl_certfile=http.tls_certificate,
        ssl_keyfile=http.tls_key,
        server_header=False,
    )
