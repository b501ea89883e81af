"""The gRPC service in Ray Serve's proxy (`grpc.direct: false`), where every call is watched.

Serve's proxy (Ray 2.60) passes a client's cancellation on only while it waits for the replica; one that
comes while it writes to the client is lost, and the replica goes on to the end of the stream. So the function
by which the proxy learns of the service also watches every call there, and has those that the client gave up
ended in the cell.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from ray import serve

from deployments.call_ids import clean_request_id, new_call_id, new_unique
from deployments.names import APP_NAME, FRONT_END_NAME
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc

_log = logging.getLogger(__name__)

#: What `serve.start` is told.
SERVICER_FUNCTIONS = [
    "deployments.grpc_proxy.add_generation_to_proxy",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]

#: When an abandoned call is looked for in the cell; at first it may still be on its way there.
_CANCEL_AFTER_S = (0.0, 0.1, 0.5, 2.0)


def add_generation_to_proxy(servicer: Any, server: Any) -> None:
    """Register the service with Serve's proxy, whose handlers for it are watched."""
    factory = getattr(server, "service_handler_factory", None)
    if factory is None:
        _log.warning("this Ray's gRPC proxy cannot be watched: cancellations by clients may get lost")
        pb_grpc.add_GenerationServicer_to_server(servicer, server)
        return
    server.service_handler_factory = _watching(factory)
    try:
        pb_grpc.add_GenerationServicer_to_server(servicer, server)
    finally:
        server.service_handler_factory = factory


def _watching(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Makes handlers as `factory` does, and watches over those that generate."""

    def make(service_method: str, streaming_type: Any) -> Any:
        handler = factory(service_method=service_method, streaming_type=streaming_type)
        kind = streaming_type.name
        if service_method.endswith("/Generate") and kind == "UNARY_UNARY":
            return _watched_unary(handler)
        if service_method.endswith("/GenerateStream") and kind == "UNARY_STREAM":
            return _watched(handler)
        return handler

    return make


def _watched_unary(handler: Callable[..., Awaitable[bytes]]) -> Callable[..., Awaitable[bytes]]:
    async def handle(request: pb.GenerateRequest, context: Any) -> bytes:
        watch = _Watch(request, context)
        response = await handler(request, context)
        watch.is_over = True
        return response

    return handle


def _watched(
    handler: Callable[..., AsyncGenerator[bytes, None]],
) -> Callable[..., AsyncGenerator[bytes, None]]:
    async def handle(request: pb.GenerateRequest, context: Any) -> AsyncGenerator[bytes, None]:
        watch = _Watch(request, context)
        async for message in handler(request, context):
            if message:
                yield message
        watch.is_over = True

    return handle


class _Watch:
    """A call in the proxy; one that ends before its answer is ended in the cell too."""

    def __init__(self, request: pb.GenerateRequest, context: Any) -> None:
        self.is_over = False
        metadata = dict(context.invocation_metadata() or ())
        if not request.request_id:  # one that is wrong the replica refuses
            request.request_id = clean_request_id(str(metadata.get("x-request-id", "")))
        request.proxy_call_id = new_unique()
        self._call_id = new_call_id(request.request_id, request.proxy_call_id)
        context.add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        if not self.is_over:
            task = asyncio.get_running_loop().create_task(_cancel(self._call_id))
            _cancelling.add(task)
            task.add_done_callback(_cancelling.discard)


#: The event loop holds tasks weakly.
_cancelling: set[asyncio.Task[None]] = set()


async def _cancel(call_id: str) -> None:
    front_end = serve.get_deployment_handle(FRONT_END_NAME, APP_NAME)
    for wait_s in _CANCEL_AFTER_S:
        await asyncio.sleep(wait_s)
        try:
            if await front_end.cancel_call.remote(call_id):
                return
        except Exception as error:  # a remote call: anything may come out of it
            _log.warning("an abandoned call could not be cancelled: %r", error)
