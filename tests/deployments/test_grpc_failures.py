"""A gRPC server that fails as a whole: another takes its place, and calls under way are answered."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from cluster.grpc_config import GrpcConfig
from deployments.api_service import ApiService
from deployments.grpc_server import GrpcThread
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from tests.deployments.test_grpc_connections import BEGINNING, call
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import ANSWER, codec

HI = pb.GenerateRequest(prompt="hi", max_tokens=100)


def is_replaced(caplog: pytest.LogCaptureFixture, times: int) -> bool:
    return caplog.text.count("another takes its place") == times


async def begun(stub: Any) -> tuple[Any, str]:
    """A stream under way, and its text so far."""
    stream = stub.GenerateStream(HI)
    return stream, (await stream.read()).choice.text


async def rest_of(stream: Any) -> str:
    text = ""
    while (chunk := await stream.read()) is not grpc.aio.EOF:
        text += chunk.choice.text
    return text


async def fail(port: int) -> None:
    """Have the server fail, as whoever can connect may."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(BEGINNING + call("/\udcff", b"", errors="surrogateescape"))
    await writer.drain()
    writer.close()


@pytest.fixture
async def thread(cell: CellStandIn, free_port: int) -> GrpcThread:
    """A server whose answers take a while; the test ends it."""
    cell.pause_s = 0.05
    config = GrpcConfig(enabled=True, port=free_port)
    return await asyncio.to_thread(GrpcThread, config, lambda: ApiService(cell, codec()))


async def test_a_method_that_is_no_text_ends_no_server(
    thread: GrpcThread, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One such call, with no key, and nobody was answered over gRPC any more."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        for times in (1, 2):
            stream, text = await begun(stub)
            await fail(free_port)
            await eventually(lambda times=times: is_replaced(caplog, times))
            answer = await stub.Generate(HI, wait_for_ready=True, timeout=10.0)
            assert answer.choices[0].text == text + await rest_of(stream) == ANSWER
        async with asyncio.timeout(10.0):
            await thread.drain(300.0)


async def test_calls_of_a_server_that_failed_are_waited_for_by_a_drain(
    thread: GrpcThread, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        stream, text = await begun(pb_grpc.GenerationStub(channel))
        await fail(free_port)
        await eventually(lambda: is_replaced(caplog, 1))
        draining = asyncio.create_task(thread.drain(300.0))
        assert text + await rest_of(stream) == ANSWER
        async with asyncio.timeout(10.0):
            await draining
