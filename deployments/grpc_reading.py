"""The message of a call over gRPC: it has to come in time and to be readable, or the client is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from deployments import grpc_mapping as mapping
from deployments.authentication import Authenticator
from deployments.errors import ApiError, bad_request
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_calls import counted
from deployments.grpc_service import SERVICE_NAME

_Context = grpc.aio.ServicerContext[Any, Any]

#: Calls whose messages are awaited at once: each takes some 20 KB.
MOST_AWAITED = 1024

#: By then a call that gRPC has ended is cancelled.
_TOLD_WITHIN_S = 0.1


class Reading(grpc.aio.ServerInterceptor):
    """Reads messages where calls can be answered.

    gRPC itself waits for a message for ever, also for one that the client has said does not come, and ends a
    call whose message cannot be read as `UNKNOWN`, a server's bug.

    Handlers of single messages are coroutines, those of streams of answers too.

    Args:
        within_s: how long after a call its message may come.
        metrics: count the calls that are refused here.
        authenticator: whose keys calls of generation need. Who has none awaits nothing, in nobody's place.
    """

    def __init__(self, within_s: float, metrics: FrontEndMetrics, authenticator: Authenticator) -> None:
        self._within_s, self._metrics, self._authenticator = within_s, metrics, authenticator
        self._num_awaited = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        reads = handler.request_deserializer
        answers = handler.unary_stream if handler.response_streaming else handler.unary_unary
        named, _, method = handler_call_details.method.rpartition("/")
        needs_key = named == f"/{SERVICE_NAME}"

        def read(data: bytes) -> Any:
            try:
                return reads(data)
            except DecodeError as error:
                return error

        async def answer(_: Any, context: _Context) -> Any:
            sent = mapping.metadata_of(context)
            try:
                if needs_key:
                    with self._authenticator.admitted(mapping.authorization_of(sent), "api"):
                        pass
                message = await self._message(context)
            except ApiError as error:
                with contextlib.suppress(ApiError), counted(self._metrics, method, sent):
                    raise
                await context.abort(*mapping.status(error))
            return await answers(message, context)

        # As if clients might send several: what reads a single one before it asks the handler has no limits.
        kind = "stream_stream" if handler.response_streaming else "stream_unary"
        single = {"unary_unary": None, "unary_stream": None}
        return handler._replace(request_streaming=True, request_deserializer=read, **{**single, kind: answer})

    async def _message(self, context: _Context) -> Any:
        if self._num_awaited >= MOST_AWAITED:
            raise ApiError(
                429,
                "The messages of as many calls are awaited as this server allows; try again in a moment.",
                code="too_many_requests",
                retry_after_s=1.0,
            )
        self._num_awaited += 1
        try:
            async with asyncio.timeout(self._within_s):
                message: Any = await context.read()
        except TimeoutError:
            raise ApiError(
                408,
                f"The message did not come within {self._within_s:g} s, the server's `grpc.read_timeout_s`.",
                code="request_timeout",
            ) from None
        finally:
            self._num_awaited -= 1
        if message is grpc.aio.EOF:
            # It looks the same if gRPC has ended the call, over a message too large or as its client did.
            await asyncio.sleep(_TOLD_WITHIN_S)
            raise bad_request("The call has no message.", code="missing_message")
        if isinstance(message, DecodeError):
            raise bad_request("The message cannot be read: it is cut off, or a text in it is no UTF-8.")
        return message
