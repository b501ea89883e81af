"""Requests that ask for another protocol, as Java's client and `curl --http2` do, are answered here."""

from __future__ import annotations

import asyncio

import pytest

from cluster.http_config import HttpConfig
from deployments.api_service import ApiService
from tests.deployments.test_early_answers import HEALTH, connected
from tests.deployments.test_http_limits import serving

LIMITS = HttpConfig(port=0, read_timeout_s=30.0, request_timeout_s=None)
HTTP2 = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + HTTP2
BODY = b'{"prompt": "hi", "max_tokens": 3}'
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY)
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY)


@pytest.mark.parametrize(
    "pieces",
    [
        (WHOLE + BODY,),
        (WHOLE, BODY),
        (HEAD[:99], WHOLE[99:] + BODY[:5], BODY[5:]),
        (CHUNKED, BODY + b"\r\n0\r\n\r\n"),
    ],
    ids=["at once", "body apart", "in pieces", "chunked"],
)
async def test_the_body_is_read_and_the_connection_kept(
    service: ApiService, pieces: tuple[bytes, ...]
) -> None:
    async with serving(service, LIMITS) as port, connected(port) as (answer, _, writer):
        for _ in range(2):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
            head, body = await answer()
            assert head.startswith(b"HTTP/1.1 200 "), body
            assert b'"completion_tokens":3' in body
            writer.write(HEALTH)
            assert (await answer())[0].startswith(b"HTTP/1.1 200 ")


async def test_a_request_for_a_websocket_is_one_as_any_other(service: ApiService) -> None:
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    asked = (
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + key + b"\r\n"
    )
    async with serving(service, LIMITS) as port, connected(port) as (answer, _, writer):
        writer.write(asked + HEALTH)
        for _ in range(2):
            assert (await answer())[0].startswith(b"HTTP/1.1 200 ")


async def test_many_in_one_read_are_answered_in_turn(service: ApiService) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
    async with serving(service, LIMITS) as port, connected(port) as (answer, _, writer):
        writer.write(asked * 1200)  # more than calls may be nested
        for _ in range(1200):
            assert (await answer())[0].startswith(b"HTTP/1.1 200 ")
