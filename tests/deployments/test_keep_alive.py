"""Comments in streams that have nothing to say for long, over a real socket, and who reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.http_client import event_data
from deployments.chat_client import stream_chat
from deployments.errors import ApiError
from deployments.event_streams import KEEP_ALIVE, KEEP_ALIVE_BETWEEN_IDS, KEEP_ALIVE_S, event_stream
from deployments.replay_log import ReplayLog
from tests.deployments.socket_server import served
from tests.fakes.cell_stand_in import eventually

SILENCE_S = 0.03
PATH = "/v1/chat/completions"


def chunk(text: str) -> bytes:
    delta = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [delta]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class Slow:
    """A stream with silences before each event.

    Attributes:
        waits: how long each is, in multiples of what is kept silent.
        fails: what is raised after the last of them; None sends the end.
        has_ids: whether events have ids.
        keep_alive_s: after how long a comment is due.
        num_closed: how many streams were closed.
    """

    def __init__(self) -> None:
        self.waits = [4.0, 4.0, 0.0]
        self.fails: Exception | None = None
        self.has_ids = False
        self.keep_alive_s = SILENCE_S
        self.num_closed = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for number, wait in enumerate(self.waits):
                await asyncio.sleep(wait * SILENCE_S)
                yield chunk(f"{number};")
            if self.fails is not None:
                await asyncio.sleep(4 * SILENCE_S)
                raise self.fails
            yield b"data: [DONE]\n\n"
        finally:
            self.num_closed += 1

    async def with_ids(self) -> AsyncGenerator[bytes, None]:
        log = ReplayLog()

        async def write() -> None:
            async for event in self.events():
                log.add_events(event)
            log.complete()

        task = asyncio.create_task(write())
        async for part in log.read():
            yield part
        await task


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
async def url(slow: Slow) -> AsyncIterator[str]:
    app = FastAPI()

    @app.post(PATH)
    async def answer(request: Request) -> Response:
        request.state.request_id = "r-1"
        events = slow.with_ids() if slow.has_ids else slow.events()
        try:
            return await event_stream(request, events, has_ids=slow.has_ids, keep_alive_s=slow.keep_alive_s)
        except ApiError as error:
            return error.response()

    async with served(app) as address:
        yield address


def ask(client: openai.AsyncOpenAI) -> Any:
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], stream=True
    )


async def raw(url: str) -> bytes:
    async with httpx.AsyncClient() as client:
        return (await client.post(url + PATH, json={})).content


@pytest.mark.parametrize("has_ids", [False, True])
async def test_the_official_client_hears_nothing_of_comments(url: str, slow: Slow, has_ids: bool) -> None:
    slow.has_ids = has_ids
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        texts = [one.choices[0].delta.content async for one in await ask(client)]
    assert texts == ["0;", "1;", "2;"]
    content = await raw(url)
    comment = KEEP_ALIVE_BETWEEN_IDS if has_ids else KEEP_ALIVE
    assert content.startswith(comment)
    assert content.count(b": keep-alive\n") >= 3
    events = slow.with_ids() if has_ids else slow.events()
    assert content.replace(comment, b"") == b"".join([part async for part in events])


async def test_nothing_is_sent_where_there_is_no_silence(url: str, slow: Slow) -> None:
    slow.waits, slow.keep_alive_s = [0.0, 0.2, 0.2, 0.2], 5.0
    events = b"".join([event async for event in slow.events()])
    assert await raw(url) == events
    assert 5 <= KEEP_ALIVE_S < 60 / 2  # what is common in front of servers, with room for one that is late


async def test_our_own_clients_hear_nothing_of_comments(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        chunks = [one async for one in stream_chat(session, url, {})]
    assert [one["choices"][0]["delta"]["content"] for one in chunks] == ["0;", "1;", "2;"]
    lines = (await raw(url)).split(b"\n")
    assert len([line for line in lines if event_data(line) is not None]) == 4


async def test_a_failure_after_comments_is_an_event(url: str, slow: Slow) -> None:
    slow.waits, slow.fails = [], ApiError(503, "lost", code="not_ready")
    content = await raw(url)
    assert content.startswith(KEEP_ALIVE)
    last = content.replace(KEEP_ALIVE, b"")
    assert last.startswith(b"event: error\ndata: {")
    assert json.loads(last.split(b"data: ")[1])["error"]["code"] == "not_ready"
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await ask(client)
        with pytest.raises(openai.APIError, match="lost"):
            [one async for one in stream]


@pytest.mark.parametrize("waits", [[1000.0], [0.0, 1000.0]])
@pytest.mark.parametrize("leaves", ["at once", "after comments"])
async def test_who_leaves_ends_the_stream(url: str, slow: Slow, waits: list[float], leaves: str) -> None:
    slow.waits = waits
    heard = asyncio.Event()

    async def listen() -> None:
        async with httpx.AsyncClient() as client, client.stream("POST", url + PATH, json={}) as response:
            async for line in response.aiter_lines():
                if line == ": keep-alive":
                    heard.set()

    task = asyncio.create_task(listen())
    until: Callable[[], Any] = heard.wait if leaves == "after comments" else lambda: asyncio.sleep(SILENCE_S)
    await asyncio.wait_for(until(), 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: slow.num_closed == 1)
