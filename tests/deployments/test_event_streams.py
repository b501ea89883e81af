"""What a client sees of a streamed answer that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message

from deployments.event_streams import event_stream


def request() -> Request:
    async def receive() -> Message:
        return await asyncio.Future()

    return Request({"type": "http", "state": {"request_id": "r-1"}}, receive)


async def events(number: int) -> AsyncGenerator[bytes, None]:
    for index in range(number):
        yield b"data: %d\n\n" % index
    raise TypeError("a bug")


async def test_a_bug_in_the_midst_of_a_stream_is_its_last_event() -> None:
    response = await event_stream(request(), events(2))
    assert isinstance(response, StreamingResponse)
    *sent, last = [bytes(part) async for part in response.body_iterator if not isinstance(part, str)]
    assert sent == [b"data: 0\n\n", b"data: 1\n\n"]
    name, data = last.decode().strip().split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))["error"]
    assert error["code"] == "internal_error"
    assert "r-1" in error["message"]
    assert "a bug" not in last.decode()


async def test_nothing_follows_the_end_of_a_stream() -> None:
    """Not even a comment, while a slow client is still sent the end."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message["more_body"]:
            await asyncio.sleep(0.1)

    async def one() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"

    asked = request()
    response = await event_stream(asked, one(), keep_alive_s=0.02)
    await response({"type": "http"}, asked.receive, send)
    assert [message.get("body") for message in sent] == [None, b"data: 1\n\n", b""]


async def test_a_client_that_left_before_its_late_response_ends_the_request() -> None:
    closed: list[str] = []

    async def silent() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(1000)
            yield b""
        finally:
            closed.append("closed")

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await asyncio.sleep(0)

    response = await event_stream(request(), silent(), keep_alive_s=0.01)
    assert closed == []
    await response({"type": "http"}, gone, send)
    assert closed == ["closed"]


async def test_a_bug_before_the_first_event_is_raised() -> None:
    with pytest.raises(TypeError):
        await event_stream(request(), events(0))
