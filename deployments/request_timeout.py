"""How long an HTTP request may take, and how it is told that its time is over."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import ApiError
from deployments.event_streams import error_event
from deployments.open_calls import CUT_OFF, OpenCalls
from deployments.refusals import error_response


def request_timeout(limit_s: float) -> ApiError:
    """A 504 for a request that took longer than the server lets requests take."""
    return ApiError(
        504,
        f"The request took longer than {limit_s:g} s, the server's `http.request_timeout_s`; ask for fewer "
        "tokens.",
        code="deadline_exceeded",
    )


class RequestTimeout:
    """Ends requests that take too long: a 504, or an error event in a stream that has begun.

    Args:
        app: answers them.
        limit_s: how long they may take; any time if None.
        calls: in which they are noted; cut off, they end likewise, with a 503.
    """

    def __init__(self, app: ASGIApp, limit_s: float | None, calls: OpenCalls | None = None) -> None:
        self._app = app
        self._limit_s = limit_s
        self._calls = calls or OpenCalls()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
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
                with self._calls.with_one(limit):
                    await self._app(scope, receive, noted)
        except TimeoutError:
            if not limit.expired():
                raise  # somebody else's
            is_late = self._limit_s is not None and not self._calls.are_cut_off
            error = request_timeout(self._limit_s or 0.0) if is_late else CUT_OFF
            if not started:
                await error_response(error)(scope, receive, send)
            elif is_stream and not complete:
                await send({"type": "http.response.body", "body": error_event(error)})
