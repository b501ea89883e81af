"""What comes behind the chunks of a body: it is no header, and is not kept."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.http_config import HttpConfig
from deployments.http_limits import MOST_HEADER_BYTES, server_config
from tests.deployments.socket_server import listening
from tests.deployments.test_http_limits import told

CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


async def headers_told(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with a request's headers, as they are once its body has come."""
    request = Request(scope, receive)
    await request.body()
    await Response(msgspec.json.encode(sorted(request.headers.items())))(scope, receive, send)


def serving() -> AbstractAsyncContextManager[int]:
    config = server_config(headers_told, HttpConfig(port=0, read_timeout_s=30.0))
    config.lifespan = "off"
    return listening(config)


@pytest.mark.parametrize("pieces", [1, 3])
async def test_trailers_are_no_headers(pieces: int) -> None:
    """Whether they come with the request or later: nobody who looks at headers on its way has seen them."""
    trailers = b"Authorization: Bearer k\r\nX-Forwarded-For: 127.0.0.1\r\nExpect: 100-continue\r\n"
    sent = [CHUNKED, b"2\r\n{}\r\n0\r\n", trailers + b"\r\n"]
    async with serving() as port:
        said = await told(port, *(sent if pieces == 3 else [b"".join(sent)]), pause_s=0.02)
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert dict(msgspec.json.decode(body)).keys() == {"connection", "host", "transfer-encoding"}


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"0\r\n", b"X-More: " + b"y" * 990 + b"\r\n"),
        (b"0\r\nX-Long: ", b"y" * 1000),
        (b"2;", b"y" * 1000),
    ],
    ids=["many trailers", "a long one", "an extension of a chunk"],
)
async def test_what_is_no_body_has_an_end(begin: bytes, more: bytes) -> None:
    """300 MB of trailers took a gigabyte of a front end's memory."""
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED + b"2\r\n{}\r\n" + begin)
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while num_sent < 20 * MOST_HEADER_BYTES and not reader.at_eof():
                writer.write(more)
                await writer.drain()
                num_sent += len(more)
                await asyncio.sleep(0)
            async with asyncio.timeout(5.0):
                assert await reader.read() == b""
        assert num_sent > MOST_HEADER_BYTES
        writer.close()
