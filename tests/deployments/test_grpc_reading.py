"""Clients of gRPC that open calls and say nothing, and ones that do not read what they asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.grpc_config import GrpcConfig
from deployments import grpc_leaving, grpc_reading
from deployments.api_keys import new_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_mapping import ERROR_KEY
from deployments.grpc_server import make_server
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from tests.deployments.test_grpc_connections import BEGINNING, call
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import ANSWER, ids

METHOD = "/flotilla.v1.Generation/Generate"
METRICS = FrontEndMetrics("one")


@pytest.fixture
async def port(service: ApiService, free_port: int) -> AsyncIterator[int]:
    """Of a server that waits half a second for whatever a client is to do."""
    config = GrpcConfig(
        enabled=True, port=free_port, read_timeout_s=0.5, write_timeout_s=0.5, max_message_bytes=4096
    )
    server = make_server(config, service, METRICS)
    await server.start()
    yield free_port
    await server.stop(None)


@pytest.fixture
async def channel(port: int) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened


def opened(channel: grpc.aio.Channel, *, streamed: bool = False) -> Any:
    """A call whose message is up to the test."""
    if streamed:
        return channel.stream_stream(f"{METHOD}Stream")()
    return channel.stream_unary(METHOD)()


async def refusal(made: Any) -> tuple[grpc.StatusCode, str]:
    """A call's status, and the code of its error."""
    async with asyncio.timeout(10.0):
        code = await made.code()
    trailing = dict(await made.trailing_metadata())
    return code, json.loads(trailing[ERROR_KEY])["code"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_message_that_does_not_come_is_not_waited_for_for_ever(
    channel: grpc.aio.Channel, streamed: bool
) -> None:
    """Who may connect took memory as long as it liked, without a key."""
    made = opened(channel, streamed=streamed)
    assert await refusal(made) == (grpc.StatusCode.DEADLINE_EXCEEDED, "request_timeout")
    assert "grpc.read_timeout_s" in await made.details()
    assert 'errors_total{api="grpc",code="request_timeout"' in METRICS.render()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_says_it_has_no_message_is_refused(
    channel: grpc.aio.Channel, streamed: bool
) -> None:
    """It was never answered."""
    made = opened(channel, streamed=streamed)
    await made.done_writing()
    assert await refusal(made) == (grpc.StatusCode.INVALID_ARGUMENT, "missing_message")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_message_too_large_is_refused_as_that(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, streamed: bool
) -> None:
    """gRPC itself refuses it, and to who waits for it that looks as if there were none."""
    caplog.set_level("INFO", "deployments.refusals")
    made = opened(channel, streamed=streamed)
    await made.write(pb.GenerateRequest(prompt="x" * 5000).SerializeToString())
    async with asyncio.timeout(10.0):
        assert await made.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await asyncio.sleep(0.3)
    assert not caplog.records


async def test_so_many_messages_are_awaited_at_most(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_reading, "MOST_AWAITED", 2)
    calls = [opened(channel) for _ in range(3)]
    codes = sorted([(await refusal(made))[1] for made in calls])
    assert codes == ["request_timeout", "request_timeout", "too_many_requests"]
    late = opened(channel)
    await asyncio.sleep(0.1)
    await late.write(pb.GenerateRequest(prompt="hi", max_tokens=100).SerializeToString())
    assert pb.GenerateResponse.FromString(await late).choices[0].text == ANSWER


async def test_who_has_no_key_takes_no_place_of_those_whose_messages_are_awaited(
    service: ApiService, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, anybody could have others' calls refused."""
    monkeypatch.setattr(grpc_reading, "MOST_AWAITED", 0)
    key = new_key()
    authenticator = Authenticator(environment={"FLOTILLA_API_KEY": key})
    server = make_server(GrpcConfig(enabled=True, port=free_port), service, authenticator=authenticator)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        assert (await refusal(opened(channel)))[0] is grpc.StatusCode.UNAUTHENTICATED
        keyed = channel.stream_unary(METHOD)(metadata=(("authorization", f"Bearer {key}"),))
        assert (await refusal(keyed))[1] == "too_many_requests"
    await server.stop(None)


async def test_a_message_that_cannot_be_read_is_counted(channel: grpc.aio.Channel) -> None:
    made = opened(channel)
    await made.write(b"\xff\xff\xff")
    assert await refusal(made) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_value")
    assert 'calls_total{code="INVALID_ARGUMENT",front_end="one",method="Generate"}' in METRICS.render()


async def test_who_asks_what_services_there_are_asks_within_bounds(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a call lasted as long as its client liked, and there was no end to their number."""
    monkeypatch.setattr(grpc_leaving, "MOST_ASKING", 1)
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asking = stub.ServerReflectionInfo()
    await asking.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    assert (await asking.read()).list_services_response.service
    one_more = stub.ServerReflectionInfo()
    assert await refusal(one_more) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_requests")
    async with asyncio.timeout(10.0):
        assert await asking.read() is grpc.aio.EOF
        assert await asking.code() is grpc.StatusCode.OK


async def test_a_client_that_does_not_read_keeps_no_request(port: int, cell: CellStandIn) -> None:
    """It kept its place, and its memory in the cell, until a deadline that it might have set itself."""
    cell.max_tokens = 4000
    cell.per_step = 1
    cell.script = lambda submit: ids("a") * 3000
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    message = pb.GenerateRequest(prompt="hi", max_tokens=3000, ignore_eos=True).SerializeToString()
    writer.write(BEGINNING + call(f"{METHOD}Stream", message))
    await eventually(lambda: len(cell.cancels) == 1)
    writer.close()
