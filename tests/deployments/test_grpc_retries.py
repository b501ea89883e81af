"""Calls over gRPC with a key: answered once, continued where they were, the same wherever they are made."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from cluster.grpc_config import GrpcConfig
from cluster.idempotency_config import IdempotencyConfig
from deployments.api_service import ApiService
from deployments.errors import ApiError
from deployments.grpc_mapping import ERROR_KEY
from deployments.grpc_retries import KeyedCalls
from deployments.grpc_server import make_server
from deployments.grpc_service import GenerationService
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import ANSWER

HI = pb.GenerateRequest(prompt="hi", max_tokens=100)
KEY = (("idempotency-key", "6f1e"),)


@contextlib.asynccontextmanager
async def serving(service: ApiService, port: int, default_deadline_s: float) -> AsyncIterator[Any]:
    config = GrpcConfig(enabled=True, port=port, default_deadline_s=default_deadline_s)
    server = make_server(config, service, idempotency=IdempotencyConfig(grace_s=0.5))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield pb_grpc.GenerationStub(opened)
    await server.stop(None)


@pytest.fixture
async def stub(service: ApiService, free_port: int) -> AsyncIterator[Any]:
    async with serving(service, free_port, 600.0) as made:
        yield made


@pytest.fixture
async def impatient(service: ApiService, free_port: int) -> AsyncIterator[Any]:
    """Of a server that lets calls without a deadline take half a second."""
    async with serving(service, free_port, 0.5) as made:
        yield made


async def chunks(
    stub: Any, metadata: Sequence[tuple[str, str]] = KEY, timeout: float | None = None
) -> list[pb.GenerateChunk]:
    return [chunk async for chunk in stub.GenerateStream(HI, metadata=metadata, timeout=timeout)]


async def rest_of(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def text(told: Sequence[pb.GenerateChunk]) -> str:
    return "".join(chunk.choice.text for chunk in told)


async def test_a_whole_answer_is_generated_once(stub: Any, cell: CellStandIn) -> None:
    cell.pause_s = 0.01
    answers = await asyncio.gather(*(stub.Generate(HI, metadata=KEY) for _ in range(4)))
    answers.append(await stub.Generate(HI, metadata=KEY))
    assert len(cell.submissions) == 1
    assert {answer.choices[0].text for answer in answers} == {ANSWER}
    assert len({(answer.id, answer.metrics.seed) for answer in answers}) == 1
    other = await stub.Generate(HI, metadata=(("idempotency-key", "other"),))
    assert len(cell.submissions) == 2
    assert other.id != answers[0].id
    assert (await stub.Generate(HI)).id != answers[0].id


async def test_a_stream_that_broke_continues_after_the_last_chunk(stub: Any, cell: CellStandIn) -> None:
    cell.pause_s = 0.02
    call = stub.GenerateStream(HI, metadata=KEY)
    first = [await call.read() for _ in range(3)]
    call.cancel()
    rest = await chunks(stub, (*KEY, ("last-event-id", str(first[-1].event_id))))
    assert len(cell.submissions) == 1
    assert not cell.cancels
    assert text([*first, *rest]) == ANSWER
    whole = await chunks(stub)
    assert [chunk.event_id for chunk in whole] == list(range(len(whole)))
    assert whole == [*first, *rest]
    assert whole[-1].usage.completion_tokens > 0


async def test_nobody_coming_back_ends_it(stub: Any, cell: CellStandIn) -> None:
    cell.pause_s = 0.05
    cell.starved = True
    call = stub.GenerateStream(HI, metadata=KEY)
    await eventually(lambda: len(cell.submissions) == 1)
    call.cancel()
    await eventually(lambda: len(cell.cancels) == 1)


async def test_a_deadline_of_the_client_s_own_may_be_later_than_that_by_default(
    impatient: Any, cell: CellStandIn
) -> None:
    cell.pause_s = 0.1  # for each three tokens
    whole, streamed = await asyncio.gather(
        impatient.Generate(HI, metadata=KEY, timeout=30.0),
        chunks(impatient, (("idempotency-key", "another"),), timeout=30.0),
    )
    assert whole.choices[0].text == text(streamed) == ANSWER


async def test_who_had_no_deadline_may_come_back_for_the_rest(impatient: Any, cell: CellStandIn) -> None:
    cell.pause_s = 0.1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await impatient.Generate(HI, metadata=KEY)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "grpc.default_deadline_s" in str(caught.value.details())
    assert (await impatient.Generate(HI, metadata=KEY, timeout=30.0)).choices[0].text == ANSWER
    assert len(cell.submissions) == 1


async def test_a_key_names_the_seed_and_another_server_tells_the_same_chunks(
    stub: Any, service: ApiService
) -> None:
    """As one does that takes the place of a server that died."""
    told = await chunks(stub)
    keyed = KeyedCalls()
    elsewhere = GenerationService(service, keyed=keyed)
    again = [chunk async for chunk in elsewhere.generate_stream(HI, dict(KEY))]
    await keyed.close()
    assert [chunk.choice for chunk in again] == [chunk.choice for chunk in told]
    assert [chunk.event_id for chunk in again] == [chunk.event_id for chunk in told]
    assert again[-1].metrics.seed == told[-1].metrics.seed
    unkeyed = [chunk async for chunk in stub.GenerateStream(HI)]
    assert unkeyed[-1].metrics.seed != told[-1].metrics.seed
    assert not any(chunk.HasField("event_id") for chunk in unkeyed)


async def test_a_key_of_another_request_is_refused(stub: Any) -> None:
    await stub.Generate(HI, metadata=KEY)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Generate(pb.GenerateRequest(prompt="ho"), metadata=KEY)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    error = json.loads(dict(refused.value.trailing_metadata())[ERROR_KEY])
    assert error["code"] == "idempotency_key_reused"
    # How it is called in logs is no part of what is asked.
    renamed = pb.GenerateRequest(prompt="hi", max_tokens=100, request_id="again")
    assert (await stub.Generate(renamed, metadata=KEY)).choices[0].text == ANSWER


async def test_malformed_metadata_is_said(stub: Any) -> None:
    without_key = (("last-event-id", "3"),)
    for metadata in ((("idempotency-key", ""),), (*KEY, ("last-event-id", "x")), without_key):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await chunks(stub, metadata)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_failure_in_the_midst_is_an_error_after_what_came(stub: Any, cell: CellStandIn) -> None:
    cell.pause_s = 0.02
    call = stub.GenerateStream(HI, metadata=KEY)
    assert (await call.read()).event_id == 0
    cell.away = True
    cell.lose_after = [1]
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await rest_of(call)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    # Who tries again begins anew.
    cell.away = False
    assert text(await chunks(stub)) == ANSWER


async def test_keys_are_refused_where_the_proxy_ends_abandoned_calls(service: ApiService) -> None:
    behind = GenerationService(service, behind_proxy=True)
    with pytest.raises(ApiError, match="proxy") as refused:
        await behind.generate(HI, dict(KEY))
    assert refused.value.status == 501
