"""What every streamed answer goes through, and every answer that its client may no longer wait for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from deployments.errors import ApiError, internal
from deployments.refusals import error_body
from deployments.request_context import current_request

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

#: A stream that has sent nothing for so long sends a comment: by default nginx and AWS's load balancers hang
#: up after a minute of silence.
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
#: The same where events have ids. OpenAI's client takes an empty line after an id, even one of long before,
#: for the end of an event, and fails on one without data.
KEEP_ALIVE_BETWEEN_IDS = b": keep-alive\n"


async def event_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    headers: Mapping[str, str] | None = None,
    *,
    has_ids: bool = False,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> Response:
    """The response that streams server-sent events, with comments where there are none for long.

    Raises what fails before the first event, unless that is so late that the response has begun; what fails
    then is the last event.

    Args:
        request: what is answered.
        events: the stream.
        headers: more of them, of the response.
        has_ids: whether events have ids.
        keep_alive_s: how long nothing may be sent.
    """
    # The status line waits for the first event, so that a rejection is a status and not a broken stream.
    first = asyncio.ensure_future(anext(events, b""))
    try:
        await unless_disconnected(request, asyncio.wait({first}, timeout=keep_alive_s))
        if first.done():
            first.result()
    except BaseException:
        await _end(first)
        raise
    return _EventStream(
        first,
        events,
        str(request.state.request_id),
        KEEP_ALIVE_BETWEEN_IDS if has_ids else KEEP_ALIVE,
        keep_alive_s,
        {**_STREAM_HEADERS, **(headers or {})},
    )


class _EventStream(StreamingResponse):
    """Events as they come, and comments while none come."""

    def __init__(
        self,
        first: asyncio.Task[bytes],
        rest: AsyncGenerator[bytes, None],
        request_id: str,
        keep_alive: bytes,
        keep_alive_s: float,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(_chain(first, rest, request_id), media_type="text/event-stream", headers=headers)
        self._first, self._rest = first, rest
        self._keep_alive, self._keep_alive_s = keep_alive, keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Also of a client that left before anything was sent, so that nothing was read.
            await _end(self._first)
            await self._rest.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send everything; a timer of its own sends the comments, so that events cost no more than before."""
        now = asyncio.get_running_loop().time
        last = now()

        async def beat() -> None:
            nonlocal last
            while True:
                await asyncio.sleep(last + self._keep_alive_s - now())
                if now() >= last + self._keep_alive_s:
                    last = now()
                    await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})

        beating: asyncio.Task[None] | None = None

        async def noted(message: Message) -> None:
            nonlocal last, beating
            if message["type"] == "http.response.start":
                await send(message)
                beating = asyncio.create_task(beat())
            else:
                if beating is not None and not message.get("more_body", False):
                    beating.cancel()  # nothing may follow this message
                await send(message)
            last = now()

        try:
            await super().stream_response(noted)
        finally:
            if beating is not None:
                await _end(beating)


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end; what it failed with is nobody's concern any more."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def unless_disconnected(request: Request, work: Awaitable[_Result]) -> _Result:
    """The result of `work`, which is cancelled when the client goes away; raises `ClientDisconnect` then."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        # The cell must have been told to stop before the request counts as over.
        await asyncio.gather(working, watching, return_exceptions=True)


def error_event(error: ApiError) -> bytes:
    """How a failure in the midst of a stream is told, as its last event.

    It never has an id: when the answer is generated anew, another event is at its position. The request at
    hand remembers why it failed.
    """
    request = current_request()
    if request is not None:
        request.error = error
    if error.event is not None:
        return error.event
    return b"event: error\ndata: " + json.dumps(error_body(error, request)).encode() + b"\n\n"


async def _chain(
    first: asyncio.Task[bytes], rest: AsyncGenerator[bytes, None], request_id: str
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(rest):
        try:
            yield await first
            async for event in rest:
                yield event
        except ApiError as error:
            yield error_event(error)
        except Exception:  # a bug; a connection that just breaks off would look like the network's fault
            _log.exception("request %s failed in the midst of its answer", request_id)
            bug = internal(request_id)
            bug.is_logged = True
            yield error_event(bug)
