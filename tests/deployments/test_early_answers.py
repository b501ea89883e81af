"""Requests that are answered before their body has come: what comes of it is neither headers nor a reason to
hang up, and the answer reaches its client."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from cluster.http_config import HttpConfig
from deployments import http_limits
from deployments.api_service import ApiService
from tests.deployments.test_http_limits import serving, told

JSON = {"Content-Type": "application/json"}
LIMITS = HttpConfig(port=0, read_timeout_s=30.0, request_timeout_s=None)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

Read = Callable[[], Awaitable[tuple[bytes, bytes]]]


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[Read, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, and what reads the next answer's head and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def answer() -> tuple[bytes, bytes]:
        async with asyncio.timeout(5.0):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            return head, await reader.readexactly(length)

    try:
        yield answer, reader, writer
    finally:
        writer.close()


def post(length: int, path: str = "/v1/embeddings", *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_a_body_that_comes_after_the_answer_is_dropped(service: ApiService) -> None:
    async with serving(service, LIMITS) as port, connected(port) as (answer, _, writer):
        for _ in range(2):
            writer.write(post(200_000))
            assert (await answer())[0].startswith(b"HTTP/1.1 404 ")
            for _ in range(10):
                writer.write(b"x" * 20_000)
                await writer.drain()
                await asyncio.sleep(0.01)
            # With the body's end comes the beginning of another request.
            writer.write(HEALTH)
            head, body = await answer()
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" not in head.lower()
            assert body == b'{"status":"ok"}'


async def test_the_next_request_in_the_same_read_is_answered(service: ApiService) -> None:
    async with serving(service, LIMITS) as port, connected(port) as (answer, _, writer):
        writer.write(post(90_000))
        assert (await answer())[0].startswith(b"HTTP/1.1 404 ")
        writer.write(b"x" * 90_000 + HEALTH + HEALTH[:20])
        assert (await answer())[0].startswith(b"HTTP/1.1 200 ")
        writer.write(HEALTH[20:])
        assert (await answer())[0].startswith(b"HTTP/1.1 200 ")


async def test_no_words_come_while_a_body_is_awaited(service: ApiService) -> None:
    limits = LIMITS.model_copy(update={"read_timeout_s": 0.3})
    async with serving(service, limits) as port, connected(port) as (answer, reader, writer):
        writer.write(post(200_000))
        assert (await answer())[0].startswith(b"HTTP/1.1 404 ")
        for _ in range(2):
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.05)
        async with asyncio.timeout(5.0):
            assert await reader.read() == b"", "it is hung up on in time, and without a 408"


async def test_after_such_a_body_the_connection_is_kept(service: ApiService) -> None:
    limits = LIMITS.model_copy(update={"read_timeout_s": 0.3})
    async with serving(service, limits) as port, connected(port) as (answer, _, writer):
        writer.write(post(1000))
        assert (await answer())[0].startswith(b"HTTP/1.1 404 ")
        writer.write(b"x" * 1000)
        await asyncio.sleep(0.6)
        writer.write(HEALTH)
        assert (await answer())[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("size", "path"), [(5_000_000, "/v1/completions"), (5_000_000, "/v1/embeddings")])
async def test_a_client_that_sends_all_before_it_reads_gets_its_answer(
    service: ApiService, size: int, path: str
) -> None:
    """As urllib, which asks for the connection to be closed besides."""

    def ask(port: int) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=b"x" * size, headers=JSON)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        with caught.value as error:
            assert b'"code"' in error.read()
            return error.code

    async with serving(service, LIMITS) as port:
        for _ in range(3):
            assert await asyncio.to_thread(ask, port) == (413 if path == "/v1/completions" else 404)


async def test_a_kept_connection_survives_a_body_that_is_too_large(service: ApiService) -> None:
    def ask(port: int) -> list[int]:
        connection, statuses = http.client.HTTPConnection("127.0.0.1", port, timeout=10), []
        for body in (b"x" * 5_000_000, b"{}"):
            connection.request("POST", "/v1/completions", body, JSON)
            with connection.getresponse() as response:
                response.read()
                statuses.append(response.status)
        connection.close()
        return statuses

    async with serving(service, LIMITS) as port:
        assert await asyncio.to_thread(ask, port) == [413, 400]


async def test_what_is_dropped_has_an_end(service: ApiService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "DRAINED_BYTES", 100_000)
    limits = LIMITS.model_copy(update={"max_body_bytes": 50_000})
    async with serving(service, limits) as port:
        for length, closes in ((150_000, False), (150_001, True)):
            async with connected(port) as (answer, _, writer):
                writer.write(post(length))
                head, _ = await answer()
                assert head.startswith(b"HTTP/1.1 404 ")
                assert (b"connection: close" in head.lower()) is closes
                writer.write(b"x" * length)
                if not closes:
                    writer.write(HEALTH)
                    assert (await answer())[0].startswith(b"HTTP/1.1 200 ")
        async with connected(port) as (answer, reader, writer):
            # Nothing says how long this one is.
            writer.write(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert (await answer())[0].startswith(b"HTTP/1.1 404 ")
            num_sent = 0
            with contextlib.suppress(ConnectionError):
                while num_sent < 10_000_000 and not reader.at_eof():
                    writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
                    await writer.drain()
                    num_sent += 10_000
                    await asyncio.sleep(0.001)
            assert 150_000 <= num_sent < 10_000_000


@pytest.mark.parametrize("size", [60_000, 70_000])
async def test_headers_that_come_at_once_have_the_same_end(service: ApiService, size: int) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * size + b"\r\n"
    many = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Longer: y\r\n" * (size // 13)
    path = b"GET /health?" + b"y" * size + b" HTTP/1.1\r\nHost: x\r\n"
    async with serving(service, LIMITS) as port:
        for head in (one, many, path):
            said = await told(port, head + b"Connection: close\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 200 " if size == 60_000 else b"HTTP/1.1 431 "), said
            assert b"connection: close" in said.lower()
