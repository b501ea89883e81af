"""Streams whose events are the same in every run of a request: one per token, choices taking turns.

How many tokens a step commits, and which choice is a step ahead, differs from run to run. Positions in a
stream then mean nothing in another run of it; here they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from deployments.drained_streams import DrainQueue, drained, take
from deployments.generation import Update


async def token_by_token(updates: AsyncGenerator[Update, None]) -> AsyncGenerator[Update, None]:
    """The updates of one choice, each divided into one per token; its end is an update of its own."""
    async with aclosing(updates):
        async for update in updates:
            for part in divided(update):
                yield part


def divided(update: Update) -> Iterator[Update]:
    """An update as one per token; its end is one of its own."""
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
            pieces=(text,),
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
    queues: list[DrainQueue[Update]] = [asyncio.Queue() for _ in choices]
    running = list(queues)
    with drained(choices, queues):
        while running:
            for queue in list(running):
                update = await take(queue)
                if update is None:
                    running.remove(queue)
                else:
                    yield update
