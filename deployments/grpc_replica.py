"""What a front end answers through Ray Serve's gRPC proxy (`grpc.direct: false`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from grpc_health.v1 import health_pb2

from deployments import grpc_mapping as mapping
from deployments.errors import ApiError
from deployments.grpc_service import GenerationService
from deployments.proto.flotilla.v1 import generation_pb2 as pb

_Message = TypeVar("_Message")
_Response = TypeVar("_Response")


class GrpcReplica:
    """Methods that Serve's proxy calls in a front end, by the names of the service's.

    Deadlines are the proxy's business; the longest is kept here too, for requests that outlive their proxy.
    """

    grpc_service: GenerationService
    grpc_deadline_s: float | None = None

    async def Generate(self, request: pb.GenerateRequest, grpc_context: Any) -> pb.GenerateResponse:
        """A whole answer."""
        ends_at = _end(self.grpc_deadline_s)
        work = self.grpc_service.generate(request, mapping.metadata_of(grpc_context), ends_at)
        return await _answered(grpc_context, work, pb.GenerateResponse(), ends_at, self.grpc_deadline_s)

    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: Any
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """An answer as it grows."""
        ends_at = _end(self.grpc_deadline_s)
        chunks = self.grpc_service.generate_stream(request, mapping.metadata_of(grpc_context), ends_at)
        streamed = _streamed(grpc_context, chunks, pb.GenerateChunk(), ends_at, self.grpc_deadline_s)
        async with aclosing(streamed) as messages:
            async for message in messages:
                yield message

    async def Cancel(self, request: pb.CancelRequest, grpc_context: Any) -> pb.CancelResponse:
        """End requests by their id."""
        return await _answered(
            grpc_context,
            self.grpc_service.cancel(request, mapping.metadata_of(grpc_context)),
            pb.CancelResponse(),
        )

    async def cancel_call(self, call_id: str) -> int:
        """End one call, which the proxy found abandoned; how many choices were running."""
        return await self.grpc_service.cancel_call(call_id)

    async def ListModels(self, request: pb.ListModelsRequest, grpc_context: Any) -> pb.ListModelsResponse:
        """The models served."""
        return await _answered(
            grpc_context,
            self.grpc_service.list_models(mapping.metadata_of(grpc_context)),
            pb.ListModelsResponse(),
        )

    async def Describe(self, request: pb.DescribeRequest, grpc_context: Any) -> pb.DescribeResponse:
        """What the server is."""
        return await _answered(
            grpc_context, self.grpc_service.describe(mapping.metadata_of(grpc_context)), pb.DescribeResponse()
        )

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Whether requests would be served now."""
        return await _answered(
            grpc_context, self.grpc_service.check(request), health_pb2.HealthCheckResponse()
        )

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The health, whenever it changes."""
        health = self.grpc_service.watch(request)
        async with aclosing(_streamed(grpc_context, health, health_pb2.HealthCheckResponse())) as messages:
            async for message in messages:
                yield message


def _end(limit_s: float | None) -> float | None:
    """When a call that begins now is to be over, by the loop's time."""
    return None if limit_s is None else asyncio.get_running_loop().time() + limit_s


async def _answered(
    context: Any,
    work: Awaitable[_Response],
    nothing: _Response,
    ends_at: float | None = None,
    limit_s: float | None = None,
) -> _Response:
    try:
        async with asyncio.timeout_at(ends_at):
            return await work
    except TimeoutError:
        _fail(context, mapping.deadline_exceeded(limit_s))
    except ApiError as error:
        _fail(context, error)
    return nothing


async def _streamed(
    context: Any,
    messages: AsyncGenerator[_Message, None],
    nothing: _Message,
    ends_at: float | None = None,
    limit_s: float | None = None,
) -> AsyncGenerator[_Message, None]:
    try:
        async with aclosing(messages):
            while True:
                try:
                    # Not around the loop: it would also interrupt whoever takes the messages.
                    async with asyncio.timeout_at(ends_at):
                        message = await anext(messages)
                except StopAsyncIteration:
                    return
                yield message
    except TimeoutError:
        _fail(context, mapping.deadline_exceeded(limit_s))
    except ApiError as error:
        _fail(context, error)
    # The status travels with a message; this one, empty, the proxy keeps to itself (`grpc_proxy`).
    yield nothing


def _fail(context: Any, error: ApiError) -> None:
    # Not raised: of an exception Serve keeps code and message, and drops the trailing metadata.
    code, details, trailing = mapping.status(error)
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(list(trailing))
