"""What every streamed answer goes through, and every answer that its client may no longer wait for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from deployments.errors import ApiError, internal

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def event_stream(
    request: Request, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None
) -> Response:
    """The response that streams server-sent events.

    Raises what fails before the first; what fails later is the last event.
    """

    async def first_event() -> bytes:
        return await anext(events, b"")

    # The status line waits for the first event, so that a rejection is a status and not a broken stream.
    first = await unless_disconnected(request, first_event())
    return StreamingResponse(
        _chain(first, events, str(request.state.request_id)),
        media_type="text/event-stream",
        headers={**_STREAM_HEADERS, **(headers or {})},
    )


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
    """How a failure in the midst of a stream is told."""
    return b"event: error\ndata: " + json.dumps(error.body()).encode() + b"\n\n"


async def _chain(
    first: bytes, rest: AsyncGenerator[bytes, None], request_id: str
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(rest):
        yield first
        try:
            async for event in rest:
                yield event
        except Exception:  # a bug; a connection that just breaks off would look like the network's fault
            _log.exception("request %s failed in the midst of its answer", request_id)
            yield error_event(internal(request_id))
