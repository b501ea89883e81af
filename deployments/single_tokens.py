"""Streams whose events are the same in every run of a request: one per token, choices taking turns.

How many tokens a step commits, and which choice is a step ahead, differs from run to run. Positions in a
stream then mean nothing in another run of it; here they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from deployments.generation import Update


async def token_by_token(updates: AsyncGenerator[Update, None]) -> AsyncGenerator[Update, None]:
    """The updates of one choice, each divided into one per token; its end is an update of its own."""
    async with aclosing(updates):
        async for update in updates:
            for part in _divided(update):
                yield part


def _divided(update: Update) -> Iterator[Update]:
    shown = 0
    for index, token in enumerate(update.tokens):
        text = update.pieces[index] if index < len(update.pieces) else ""
        shown += len(text)
        yield Update(
            update.choice,
            text,
            [token],
            update.logprobs[index : index + 1],
            prompt_logprobs=[] if index else update.prompt_logprobs,
        )
    if update.finish_reason is not None:
        yield replace(
            update,
            text=update.text[shown:],
            tokens=[],
            logprobs=[],
            prompt_logprobs=[] if update.tokens else update.prompt_logprobs,
            pieces=(),
        )


async def in_turns(choices: Sequence[AsyncGenerator[Update, None]]) -> AsyncGenerator[Update, None]:
    """One update of each choice after the other, until all have ended; all run meanwhile.

    The first failure ends all. Updates of a choice that is ahead wait for the others.
    """
    queues: list[asyncio.Queue[Update | BaseException | None]] = [asyncio.Queue() for _ in choices]

    async def drain(
        choice: AsyncGenerator[Update, None], queue: asyncio.Queue[Update | BaseException | None]
    ) -> None:
        try:
            async with aclosing(choice) as updates:
                async for update in updates:
                    queue.put_nowait(update)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(drain(*pair)) for pair in zip(choices, queues, strict=True)]
    running = list(queues)
    try:
        while running:
            for queue in list(running):
                item = await queue.get()
                if item is None:
                    running.remove(queue)
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
    finally:
        for task in tasks:
            task.cancel()
