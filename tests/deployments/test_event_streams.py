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


async def test_a_bug_before_the_first_event_is_raised() -> None:
    with pytest.raises(TypeError):
        await event_stream(request(), events(0))
