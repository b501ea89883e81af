"""A server that ends: who keeps a connection is told so before it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from cluster.http_config import HttpConfig
from deployments.http_limits import server_config
from tests.deployments.socket_server import listening

#: By then a server of uvicorn, which looks every tenth of a second, has begun to end.
ENDING_S = 0.4

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"


class Streaming:
    """An application one of whose answers ends when it is told to."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.app = FastAPI()
        self.app.add_api_route("/stream", self.stream)
        self.app.add_api_route("/", self.answer, methods=["GET", "POST"])

    async def stream(self) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"begun"
            await self.end.wait()

        return StreamingResponse(pieces())

    async def answer(self, request: Request) -> Response:
        return PlainTextResponse(await request.body() or b"here")


@pytest.fixture
def streaming() -> Streaming:
    return Streaming()


class Kept:
    """A connection that is kept between requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Kept:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def head_of(self, request: bytes) -> bytes:
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        return head

    async def ask(self) -> bytes:
        """The head of an answer that is read to its end."""
        head = await self.head_of(GET)
        assert await self.reader.readexactly(4) == b"here"
        return head


async def test_who_read_a_stream_may_ask_once_more(streaming: Streaming) -> None:
    """Its head was sent before the server was to end, and told the client to keep the connection."""
    async with listening(server_config(streaming.app, HttpConfig(port=0))) as port:
        kept = await Kept.open(port)
        assert b"connection: close" not in await kept.head_of(STREAM)

        async def last() -> tuple[bytes, bytes]:
            await asyncio.sleep(ENDING_S)
            streaming.end.set()
            await kept.reader.readuntil(b"0\r\n\r\n")
            await asyncio.sleep(0.1)
            return await kept.ask(), await kept.reader.read()

        asking = asyncio.create_task(last())
    head, rest = await asking
    assert b"connection: close" in head
    assert rest == b"", "the connection was kept, or more was said"
    kept.writer.close()


async def test_a_pool_of_connections_loses_no_request(streaming: Streaming) -> None:
    """aiohttp hands the connection of a stream that has ended to whoever waits for one."""
    pool = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1))
    begun = asyncio.Event()
    async with pool, listening(server_config(streaming.app, HttpConfig(port=0))) as port:
        url = f"http://127.0.0.1:{port}"

        async def read_a_stream() -> bytes:
            async with pool.get(f"{url}/stream") as answer:
                begun.set()
                return await answer.read()

        async def wait_for_it() -> bytes:
            async with pool.post(url, data=b"hello") as answer:
                return await answer.read()

        async def end_it() -> None:
            await asyncio.sleep(ENDING_S)
            streaming.end.set()

        first = asyncio.create_task(read_a_stream())
        await begun.wait()
        tasks = [first, asyncio.create_task(wait_for_it()), asyncio.create_task(end_it())]
        ending = asyncio.gather(*tasks)
        await asyncio.sleep(0.05)
        # The server ends here, before the stream.
    assert (await ending)[:2] == [b"begun", b"hello"]


@pytest.mark.parametrize("goes_on", [True, False])
async def test_who_was_idle_may_ask_while_somebody_can_answer(streaming: Streaming, goes_on: bool) -> None:
    config = server_config(streaming.app, HttpConfig(port=0), goes_on=lambda: goes_on)
    async with listening(config) as port:
        kept = await Kept.open(port)
        await kept.ask()

        async def last() -> bytes:
            await asyncio.sleep(ENDING_S)
            if not goes_on:
                return await kept.reader.read()
            return await kept.ask()

        asking = asyncio.create_task(last())
    answer = await asyncio.wait_for(asking, 2.0)
    assert b"connection: close" in answer if goes_on else answer == b""
    kept.writer.close()


async def test_who_asks_no_more_is_not_waited_for(
    streaming: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.last_requests.LAST_REQUEST_S", 0.3)
    async with asyncio.timeout(10), listening(server_config(streaming.app, HttpConfig(port=0))) as port:
        idle, reads = await Kept.open(port), await Kept.open(port)
        await idle.ask()
        await reads.head_of(STREAM)
        asyncio.get_running_loop().call_later(ENDING_S, streaming.end.set)
    assert await idle.reader.read() == b""
    assert (await reads.reader.read()).endswith(b"0\r\n\r\n")
    for one in (idle, reads):
        one.writer.close()


@pytest.mark.parametrize("cut", [lambda request: 10, lambda request: len(request) - 2], ids=["head", "body"])
async def test_a_request_that_is_being_sent_is_answered(
    streaming: Streaming, monkeypatch: pytest.MonkeyPatch, cut: Callable[[bytes], int]
) -> None:
    monkeypatch.setattr("deployments.last_requests.LAST_REQUEST_S", 1.0)
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
    async with listening(server_config(streaming.app, HttpConfig(port=0))) as port:
        kept = await Kept.open(port)
        await kept.ask()

        async def last() -> bytes:
            await asyncio.sleep(ENDING_S)
            kept.writer.write(request[: cut(request)])
            await asyncio.sleep(1.2)
            kept.writer.write(request[cut(request) :])
            return await kept.reader.read()

        asking = asyncio.create_task(last())
    answer = await asking
    assert answer.endswith(b"hello")
    assert b"connection: close" in answer
    kept.writer.close()
