"""Calls in which clients may go on asking for ever, as tools do that look up what there is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc.aio

from deployments import grpc_mapping as mapping
from deployments.errors import ApiError

#: None of them needs a key.
MOST_ASKING = 64

_TOO_MANY = ApiError(
    429,
    "As many ask what services there are as this server allows; try again in a moment.",
    code="too_many_requests",
    retry_after_s=1.0,
)


class LettingGo(grpc.aio.ServerInterceptor):
    """Ends such a call once the server takes no new ones, which would wait for the client to end it, or once
    the client has asked nothing for long; and answers only so many at once.

    Args:
        leaving: set when the server takes no new calls.
        within_s: how long a client may take until it asks (again).
    """

    def __init__(self, leaving: asyncio.Event, within_s: float) -> None:
        self._leaving, self._within_s = leaving, within_s
        self._num_asking = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.stream_stream is None:
            return handler
        answers = handler.stream_stream

        async def answer(messages: AsyncIterable[Any], context: Any) -> AsyncGenerator[Any, None]:
            if self._num_asking >= MOST_ASKING:
                await context.abort(*mapping.status(_TOO_MANY))
            self._num_asking += 1
            try:
                async with (
                    aclosing(_until(self._leaving, messages, self._within_s)) as asked,
                    aclosing(answers(asked, context)) as told,
                ):
                    async for one in told:
                        yield one
            finally:
                self._num_asking -= 1

        return handler._replace(stream_stream=answer)


async def _until(
    leaving: asyncio.Event, messages: AsyncIterable[Any], within_s: float
) -> AsyncGenerator[Any, None]:
    following, left = aiter(messages), asyncio.ensure_future(leaving.wait())
    try:
        while True:
            message = asyncio.ensure_future(anext(following, None))
            try:
                await asyncio.wait({message, left}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
                if not message.done() or message.result() is None:
                    return
            finally:
                message.cancel()
            yield message.result()
    finally:
        left.cancel()
