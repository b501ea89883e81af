"""Clients that send or read too slowly, or ask for too much: each is answered or hung up on in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from cluster.http_config import HttpConfig
from deployments.api_service import ApiService
from deployments.http_limits import server_config
from deployments.metric_gathering import metrics_config
from deployments.openai_api import create_app
from tests.deployments.socket_server import listening
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import ids

LIMITS = HttpConfig(port=0, read_timeout_s=0.3, write_timeout_s=0.5, request_timeout_s=None)


def app_of(service: ApiService, limits: HttpConfig) -> FastAPI:
    return create_app(
        service, read_timeout_s=limits.read_timeout_s, request_timeout_s=limits.request_timeout_s
    )


def serving(
    service: ApiService, limits: HttpConfig, send_buffer: int | None = None
) -> AbstractAsyncContextManager[int]:
    """The port of a front end's server."""
    return listening(server_config(app_of(service, limits), limits), send_buffer)


async def told(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Everything the server says to who sends pieces and then waits, until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b""

    async def listen() -> None:
        nonlocal said
        with contextlib.suppress(ConnectionError):
            while heard := await reader.read(1 << 16):
                said += heard

    listening = asyncio.create_task(listen())
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
            if listening.done():
                break
    async with asyncio.timeout(5.0):
        await listening
    writer.close()
    return said


def post(length: int) -> bytes:
    kind = "Content-Type: application/json\r\n"
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{kind}Content-Length: {length}\r\n\r\n".encode()


HEADERS_ENDLESS = (b"GET /health HTTP/1.1\r\n", *(b"X-%d: y\r\n" % n for n in range(100)))


@pytest.mark.parametrize(
    ("pieces", "status"),
    [((), b"408"), ((b"GET /health",), b"408"), (HEADERS_ENDLESS, b"408"), ((post(9), b"{"), b"408")],
    ids=["nothing", "a line", "headers without end", "a body without end"],
)
async def test_who_sends_too_slowly_is_hung_up_on(
    service: ApiService, pieces: tuple[bytes, ...], status: bytes
) -> None:
    async with serving(service, LIMITS) as port:
        said = await told(port, *pieces, pause_s=0.02)
        assert said.startswith(b"HTTP/1.1 " + status)
        assert (b"http.read_timeout_s" in said) == (pieces[:1] == (post(9),))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/health")).status_code == 200


LONG_HEADERS = b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(9000))


async def test_headers_have_an_end(service: ApiService, cell: CellStandIn) -> None:
    cell.starved = True
    body = b'{"prompt": "hi"}'
    async with serving(service, LIMITS.model_copy(update={"read_timeout_s": 30.0})) as port:
        assert (await told(port, LONG_HEADERS)).startswith(b"HTTP/1.1 431 ")
        # Of a request that is sent while another is answered, likewise; nobody could read a status there.
        assert await told(port, post(len(body)) + body, LONG_HEADERS, pause_s=0.05) == b""
        await eventually(lambda: len(cell.cancels) == 1)


async def test_headers_have_an_end_on_the_port_for_metrics_too() -> None:
    """It has no keys, and a front end's memory is behind it."""
    async with listening(metrics_config(FastAPI())) as port:
        assert (await told(port, LONG_HEADERS)).startswith(b"HTTP/1.1 431 ")


async def test_a_connection_in_use_is_kept(service: ApiService, cell: CellStandIn) -> None:
    """The limit is for headers: neither a slow answer nor a pause between requests ends a connection."""
    cell.pause_s = 0.06
    async with serving(service, LIMITS) as port, httpx.AsyncClient() as client:
        for _ in range(2):
            answer = await client.post(
                f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "hi", "max_tokens": 20}
            )
            assert answer.elapsed.total_seconds() > LIMITS.read_timeout_s
            assert answer.status_code == 200
            await asyncio.sleep(0.4)
        connections = client._transport._pool.connections  # type: ignore[attr-defined]
        assert len(connections) == 1
        assert connections[0]._connection._request_count == 2


async def test_a_client_that_does_not_read_holds_little_and_is_hung_up_on(
    service: ApiService, cell: CellStandIn
) -> None:
    # Megabytes, which take a minute to come.
    cell.max_tokens, cell.per_step, cell.pause_s = 100_000, 2, 0.002
    cell.script = lambda submit: ids("word ") * 20_000
    received = 0
    body = b'{"prompt": "hi", "max_tokens": 20000, "stream": true, "return_token_ids": true}'
    async with serving(service, LIMITS, send_buffer=4096) as port:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, post(len(body)) + body)
        await eventually(lambda: len(cell.submissions) == 1)
        begun = loop.time()
        await eventually(lambda: len(cell.cancels) == 1, within_s=20.0)
        assert cell.cancels == [cell.submissions[0].request_id]
        assert loop.time() - begun >= LIMITS.write_timeout_s
        with contextlib.suppress(ConnectionError):
            while chunk := await loop.sock_recv(sock, 1 << 16):
                received += len(chunk)
        # Of megabytes: the server's 64 KiB, the kernel's buffers, and a chunk on its way.
        assert received < 300_000
        sock.close()


async def test_a_client_that_reads_slowly_but_steadily_gets_all(
    service: ApiService, cell: CellStandIn
) -> None:
    cell.max_tokens, cell.per_step = 100_000, 2
    cell.script = lambda submit: ids("word ") * 1500
    body = {"prompt": "hi", "max_tokens": 3000, "stream": True, "return_token_ids": True}
    async with (
        serving(service, LIMITS, send_buffer=4096) as port,
        httpx.AsyncClient() as client,
        client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as answer,
    ):
        size, begun = 0, asyncio.get_running_loop().time()
        async for chunk in answer.aiter_bytes(16_384):
            size += len(chunk)
            last = chunk
            await asyncio.sleep(0.03)
        assert last.endswith(b"data: [DONE]\n\n")
        assert size > 100_000
        assert asyncio.get_running_loop().time() - begun > 0.1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_ends_at_its_time(service: ApiService, cell: CellStandIn, stream: bool) -> None:
    cell.pause_s = 0.05
    limits = LIMITS.model_copy(update={"request_timeout_s": 0.2})
    body = {"prompt": "hi", "max_tokens": 100, "stream": stream}
    async with serving(service, limits) as port, httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
        await eventually(lambda: len(cell.cancels) == 1)
    if stream:
        assert answer.status_code == 200
        assert answer.text.count("data: {") > 1
        assert answer.text.rsplit("\n\n", 2)[-2].startswith("event: error\ndata: ")
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert "http.request_timeout_s" in answer.text


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
async def test_a_client_of_http_1_0_gets_no_chunks(
    service: ApiService, cell: CellStandIn, expect: bytes
) -> None:
    """It does not know them, and took their sizes for parts of the answer (RFC 9112, 6.1)."""
    cell.pause_s = 0.01
    body = b'{"prompt": "hi", "max_tokens": 100, "stream": true}'
    request = post(len(body)).replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n" + expect) + body
    async with serving(service, LIMITS) as port:
        said = (await told(port, request)).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        newer = await told(port, request.replace(b"HTTP/1.0\r\n", b"HTTP/1.1\r\nConnection: close\r\n"))
    head, _, events = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    parts = events.split(b"\n\n")
    assert len(parts) > 5
    assert all(part.startswith(b"data: ") for part in parts[:-1])
    assert parts[-2:] == [b"data: [DONE]", b""]
    assert b"transfer-encoding: chunked" in newer


NESTED: list[tuple[str, Callable[[str], str]]] = [
    ("the body", lambda deep: '{"prompt": "x", "logit_bias": ' + deep + "}"),
    ("unclosed", lambda deep: '{"prompt": ' + deep[: len(deep) // 2]),
    ("a schema as text", lambda deep: '{"prompt": "x", "guided_json": "' + deep + '"}'),
]


@pytest.mark.parametrize(("what", "body"), NESTED, ids=[what for what, _ in NESTED])
@pytest.mark.parametrize("depth", [300, 100_000])
async def test_json_that_is_nested_too_deep_is_refused(
    service: ApiService, what: str, body: Callable[[str], str], depth: int
) -> None:
    transport = httpx.ASGITransport(app=app_of(service, LIMITS))
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://cell", headers=headers) as client:
        answer = await client.post("/v1/completions", content=body("[" * depth + "]" * depth))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"]


def test_a_server_leaves_the_logs_of_the_process_open(tmp_path: Path) -> None:
    """Ray Serve's log is such a handler: closed, it would write nothing and keep every line in memory."""
    written = logging.FileHandler(tmp_path / "log")
    handler = logging.handlers.MemoryHandler(capacity=1, target=written)
    logger = logging.Logger("Ray Serve's")
    logger.addHandler(handler)
    for config in (server_config(FastAPI(), LIMITS), metrics_config(FastAPI())):
        assert config.access_log is False
        for number in range(100):
            logger.info("line %d", number)
    assert handler.buffer == []
    assert len((tmp_path / "log").read_text().splitlines()) == 200
    handler.close()


async def test_a_server_that_ends_answers_who_has_just_connected(
    service: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.last_requests.LAST_REQUEST_S", 1.5)

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        await asyncio.sleep(0.5)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        return await reader.read(100)

    async with serving(service, HttpConfig(port=0)) as port:
        silent, asks = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await asyncio.sleep(0.1)  # for the server to accept them
        asking = asyncio.create_task(ask(*asks))
    assert (await asking).startswith(b"HTTP/1.1 200")
    assert await silent[0].read() == b"", "it waits for ever for who sends nothing"
    for _, writer in (silent, asks):
        writer.close()
