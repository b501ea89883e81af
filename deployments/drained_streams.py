"""Several streams read at the same time, each into a queue, so that none waits for who reads the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

Item = TypeVar("Item")
#: Items of streams, None where one has ended, or the exception that ended it.
DrainQueue = asyncio.Queue[Item | BaseException | None]


@contextmanager
def drained(
    streams: Sequence[AsyncGenerator[Item, None]],
    queues: Sequence[DrainQueue[Item]],
) -> Iterator[None]:
    """Read streams to their ends while the context lasts; those that have not ended by then are closed.

    Args:
        streams: what is read.
        queues: where the items of each go; it may be the same one for several. `take` reads it.
    """
    tasks = [asyncio.create_task(_drain(*pair)) for pair in zip(streams, queues, strict=True)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def take(queue: DrainQueue[Item]) -> Item | None:
    """The next item; None at the end of a stream, and what a stream failed with is raised."""
    item = await queue.get()
    if isinstance(item, BaseException):
        raise item
    return item


async def _drain(stream: AsyncGenerator[Item, None], queue: DrainQueue[Item]) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                queue.put_nowait(item)
        queue.put_nowait(None)
    except Exception as error:  # raised where it is read
        queue.put_nowait(error)
