"""Between Ray Serve's gRPC proxy and the service: the replica's methods, and the watch in the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from enum import Enum
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from ray.serve._private.proxy_request_response import gRPCStreamingType

from deployments import grpc_proxy
from deployments.api_service import ApiService
from deployments.call_ids import call_prefix
from deployments.grpc_replica import GrpcReplica
from deployments.grpc_service import GenerationService
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import ANSWER


class Context:
    """The part of a call's context that is used, as of Serve's and of gRPC's."""

    def __init__(self, **metadata: str) -> None:
        self.metadata, self.code, self.trailing = metadata, None, {}
        self.callbacks: list[Callable[[Any], None]] = []

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return list(self.metadata.items())

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing: list[tuple[str, str]]) -> None:
        self.trailing = dict(trailing)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)


@pytest.fixture
def replica(service: ApiService) -> GrpcReplica:
    made = GrpcReplica()
    made.grpc_service = GenerationService(service, behind_proxy=True)
    made.grpc_deadline_s = 0.3
    return made


async def test_a_replica_answers_and_keeps_the_longest_deadline(
    replica: GrpcReplica, cell: CellStandIn
) -> None:
    request = pb.GenerateRequest(prompt="hi", max_tokens=100)
    assert (await replica.Generate(request, Context())).choices[0].text == ANSWER
    chunks = [chunk async for chunk in replica.GenerateStream(request, Context())]
    assert "".join(chunk.choice.text for chunk in chunks) == ANSWER
    cell.starved = True
    whole, streamed = Context(), Context()
    assert await replica.Generate(request, whole) == pb.GenerateResponse()
    assert [chunk async for chunk in replica.GenerateStream(request, streamed)] == [pb.GenerateChunk()]
    assert whole.code is streamed.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: len(cell.cancels) == 2)


async def test_errors_travel_with_an_empty_message(replica: GrpcReplica) -> None:
    context = Context()
    wrong = pb.GenerateRequest(prompt="hi", temperature=9)
    assert [chunk async for chunk in replica.GenerateStream(wrong, context)] == [pb.GenerateChunk()]
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature" in context.trailing["flotilla-error"]


async def test_the_health_is_asked_for_and_not_watched(replica: GrpcReplica) -> None:
    """Ray Serve waited for watches until it killed the replica, which so never said that it leaves."""
    answer = await replica.Check(health_pb2.HealthCheckRequest(), Context())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    context = Context()
    watch = [answer async for answer in replica.Watch(health_pb2.HealthCheckRequest(), context)]
    assert (watch, context.code) == ([health_pb2.HealthCheckResponse()], grpc.StatusCode.UNIMPLEMENTED)
    assert "Check" in context.details


async def test_an_id_that_none_can_have_is_left_for_the_replica_to_refuse(
    replica: GrpcReplica,
) -> None:
    """The request ran under another, and `Cancel` did not find it."""
    calls = []
    for name, context in (("a/b", Context()), ("", Context(**{"x-request-id": "a/b"}))):
        calls.append(pb.GenerateRequest(prompt="hi", request_id=name))
        grpc_proxy._Watch(calls[-1], context)
    wrong, unnamed = calls
    context = Context()
    await replica.Generate(wrong, context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "request_id" in context.trailing["flotilla-error"]
    # What proxies on the way set is never a reason to refuse.
    assert (await replica.Generate(unnamed, Context())).request_id == unnamed.request_id != "a/b"


class Proxy:
    """As much of Serve's gRPC server as registers a service."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.made: dict[str, Any] = {}
        self._handler = handler
        self.service_handler_factory: Callable[..., Any] = lambda service_method, streaming_type: handler

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for name in handlers[0]._method_handlers:
            kind = (
                gRPCStreamingType.UNARY_STREAM
                if name.endswith("GenerateStream")
                else gRPCStreamingType.UNARY_UNARY
            )
            self.made[name] = self.service_handler_factory(service_method=name, streaming_type=kind)

    def add_registered_method_handlers(self, name: str, handlers: Any) -> None:
        pass


@pytest.mark.parametrize("is_over", [True, False])
async def test_the_watch_ends_calls_given_up_while_the_proxy_writes(
    monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    cancelled: list[str] = []

    async def cancel(call_id: str) -> None:
        cancelled.append(call_id)

    async def handler(request: pb.GenerateRequest, context: Any) -> AsyncGenerator[bytes, None]:
        assert len(request.proxy_call_id) == 16
        for message in (b"one", b"", b"two"):
            yield message

    class Servicer(Enum):
        """Has every method, as the mock that Serve passes."""

        Generate = GenerateStream = Cancel = ListModels = Describe = None

    monkeypatch.setattr(grpc_proxy, "_cancel", cancel)
    proxy = Proxy(handler)
    factory = proxy.service_handler_factory
    grpc_proxy.add_generation_to_proxy(Servicer, proxy)
    assert proxy.service_handler_factory is factory
    assert proxy.made["/flotilla.v1.Generation/Cancel"] is handler
    context = Context(**{"x-request-id": "mine"})
    messages = proxy.made["/flotilla.v1.Generation/GenerateStream"](
        pb.GenerateRequest(prompt="x", proxy_call_id="forged"), context
    )
    assert await anext(messages) == b"one"
    if is_over:
        assert [message async for message in messages] == [b"two"]
    for callback in context.callbacks:
        callback(context)
    await asyncio.sleep(0)
    assert [call_id.startswith(call_prefix("mine")) for call_id in cancelled] == [True] * (not is_over)
