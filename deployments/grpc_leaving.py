"""Calls in which clients may go on asking for ever, as tools do that look up what there is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc.aio


class LettingGo(grpc.aio.ServerInterceptor):
    """Ends such a call once the server takes no new ones: it would wait for the client to end it.

    Args:
        leaving: set then.
    """

    def __init__(self, leaving: asyncio.Event) -> None:
        self._leaving = leaving

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.stream_stream is None:
            return handler
        answers = handler.stream_stream

        async def answer(messages: AsyncIterable[Any], context: Any) -> AsyncGenerator[Any, None]:
            async with (
                aclosing(_until(self._leaving, messages)) as asked,
                aclosing(answers(asked, context)) as told,
            ):
                async for one in told:
                    yield one

        return handler._replace(stream_stream=answer)


async def _until(leaving: asyncio.Event, messages: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    following, left = aiter(messages), asyncio.ensure_future(leaving.wait())
    try:
        while True:
            message = asyncio.ensure_future(anext(following, None))
            try:
                await asyncio.wait({message, left}, return_when=asyncio.FIRST_COMPLETED)
                if not message.done() or message.result() is None:
                    return
            finally:
                message.cancel()
            yield message.result()
    finally:
        left.cancel()
