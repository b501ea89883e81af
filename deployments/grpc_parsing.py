"""Messages over gRPC that cannot be read are the client's fault, and are told like any other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from deployments import grpc_mapping as mapping
from deployments.errors import bad_request

_Context = grpc.aio.ServicerContext[Any, Any]


class Parsing(grpc.aio.ServerInterceptor):
    """Reads messages where calls can be answered; gRPC itself would end them as `UNKNOWN`, a server's bug.

    Handlers of single messages are coroutines, those of streams of answers too.
    """

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        reads, answers = handler.request_deserializer, getattr(handler, kind)

        def read(data: bytes) -> Any:
            try:
                return reads(data)
            except DecodeError as error:
                return error

        async def answer(request: Any, context: _Context) -> Any:
            if isinstance(request, DecodeError):
                said = "The message cannot be read: it is cut off, or a text in it is no UTF-8."
                await context.abort(*mapping.status(bad_request(said)))
            return await answers(request, context)

        return handler._replace(request_deserializer=read, **{kind: answer})
