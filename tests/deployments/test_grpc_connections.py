"""How long connections to the gRPC server last: of clients that fall silent, or only ask what is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.grpc_config import GrpcConfig
from deployments.api_service import ApiService
from deployments.grpc_server import GrpcThread, make_server
from deployments.listening import listening_sockets
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import codec

#: How a client of HTTP/2 begins: the preface, and settings that change nothing.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
ACKNOWLEDGES, ENDS_STREAM, ENDS_HEADERS = 1, 1, 4


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


BEGINNING = PREFACE + frame(SETTINGS) + frame(SETTINGS, flags=ACKNOWLEDGES)


def call(method: str, message: bytes, errors: str = "strict") -> bytes:
    """All that a client sends of one."""
    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "a", "te": "trailers"}
    headers["content-type"] = "application/grpc"
    parts = (part.encode(errors=errors) for pair in headers.items() for part in pair)
    fields = [bytes([len(part)]) + part for part in parts]
    written = b"".join(b"\0" + name + value for name, value in zip(fields[::2], fields[1::2], strict=True))
    prefixed = b"\0" + len(message).to_bytes(4) + message
    return frame(HEADERS, written, ENDS_HEADERS, 1) + frame(DATA, prefixed, ENDS_STREAM, 1)


async def kinds_of_frames(reader: asyncio.StreamReader) -> list[int]:
    """Those that come until the connection ends."""
    kinds = []
    while True:
        try:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3]))
        except (EOFError, ConnectionError):
            return kinds
        kinds.append(head[3])


@asynccontextmanager
async def connected(
    service: ApiService, port: int
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that has begun and says no more by itself, of a server that pings each second."""
    server = make_server(GrpcConfig(enabled=True, port=port, keepalive_s=1.0), service)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(BEGINNING)
    yield reader, writer
    writer.close()
    await server.stop(None)


async def test_a_client_that_vanished_loses_its_request_when_the_settings_say_so(
    service: ApiService, cell: CellStandIn, free_port: int
) -> None:
    """It had a minute more to answer, by a setting of gRPC's for pings of any kind."""
    cell.starved = True
    async with connected(service, free_port) as (_, writer):
        message = pb.GenerateRequest(prompt="hi").SerializeToString()
        writer.write(call("/flotilla.v1.Generation/GenerateStream", message))
        await eventually(lambda: len(cell.submissions) == 1)
        async with asyncio.timeout(20.0):
            while not cell.cancels:
                await asyncio.sleep(0.05)


async def test_a_client_that_vanished_without_a_call_is_noticed(service: ApiService, free_port: int) -> None:
    """Its connection stayed for ever: it was pinged only while there were calls."""
    async with connected(service, free_port) as (reader, _), asyncio.timeout(20.0):
        assert PING in await kinds_of_frames(reader)


async def test_a_client_may_ping_between_its_calls(service: ApiService, free_port: int) -> None:
    """As load balancers make clients do, which were hung up on as ones that ping too often."""
    async with connected(service, free_port) as (reader, writer):
        frames = asyncio.create_task(kinds_of_frames(reader))
        for _ in range(5):
            await asyncio.sleep(0.8)
            writer.write(frame(PING, bytes(8)))
        await asyncio.sleep(0.1)
        writer.close()
        assert GOAWAY not in await frames


async def test_who_may_ask_what_services_there_are_does_not_keep_a_server_from_ending(
    cell: CellStandIn, free_port: int
) -> None:
    """As pages and shells for gRPC do while they are open: a front end took the whole of its time."""
    config = GrpcConfig(enabled=True, port=free_port)
    thread = await asyncio.to_thread(GrpcThread, config, lambda: ApiService(cell, codec()))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asking = stub.ServerReflectionInfo()
        for _ in range(2):
            await asking.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await asking.read()).list_services_response.service
        async with asyncio.timeout(10.0):
            await thread.drain(300.0)
        assert await asking.read() is grpc.aio.EOF


@pytest.mark.parametrize("ends", [True, False])
async def test_questions_end_as_their_client_has_it(service: ApiService, free_port: int, ends: bool) -> None:
    server = make_server(GrpcConfig(enabled=True, port=free_port), service)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asking = stub.ServerReflectionInfo()
        await asking.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await asking.read()).list_services_response.service
        if ends:
            await asking.done_writing()
            assert await asking.read() is grpc.aio.EOF
            assert await asking.code() is grpc.StatusCode.OK
        else:
            asking.cancel()
    async with asyncio.timeout(10.0):
        await server.stop(300.0)


async def test_a_server_that_goes_lets_no_connection_begin(cell: CellStandIn, free_port: int) -> None:
    """Its listeners are gRPC's; closed with connections that it has not accepted, they reset those."""
    config = GrpcConfig(enabled=True, port=free_port)
    thread = await asyncio.to_thread(GrpcThread, config, lambda: ApiService(cell, codec()))
    before, writer = await asyncio.open_connection("127.0.0.1", free_port)
    thread.turn_new_connections_away()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await asyncio.open_connection("127.0.0.1", free_port)
    writer.write(BEGINNING)
    assert (await before.readexactly(9))[3] == SETTINGS, "the one before is not served"
    writer.close()
    async with asyncio.timeout(10.0):
        await thread.drain(1.0)
    assert not listening_sockets(free_port)
