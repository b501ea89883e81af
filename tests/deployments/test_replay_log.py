"""The log of an answer: whoever reads it, whenever it breaks off, gets every part once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import ApiError
from deployments.generation import Update
from deployments.replay_log import ReplayLog
from deployments.single_tokens import in_turns, token_by_token

TEXTS = st.lists(st.text("ab\u00e9 \\n", max_size=3), max_size=8)


@given(texts=TEXTS, cuts=st.lists(st.integers(0, 5), max_size=6), data=st.data())
def test_any_cuts_of_a_stream_and_its_continuations_are_the_whole(
    texts: list[str], cuts: list[int], data: st.DataObject
) -> None:
    """The log grows while a client reads, leaves after any number of events, and continues from its last."""
    events = [f"data: {text!r}\n\n".encode() for text in texts]
    grows = [data.draw(st.integers(0, len(events)), label="grows by") for _ in cuts]

    async def run() -> list[bytes]:
        log, added = ReplayLog(), 0
        got: list[bytes] = []

        def grow(number: int) -> None:
            nonlocal added
            log.add_events(b"".join(events[added : added + number]))
            added = min(added + number, len(events))

        for cut, more in zip(cuts, grows, strict=True):
            grow(more)
            reader = log.read(len(got))
            for _ in range(min(cut, len(log) - len(got))):
                got.append(await anext(reader))
            await reader.aclose()
        waiting = asyncio.ensure_future(_all(log.read(len(got))))
        await asyncio.sleep(0)
        while added < len(events):
            grow(1)
            await asyncio.sleep(0)
        log.complete()
        assert await _all(log.read()) == got + await waiting
        return got + await waiting

    expected = [b"id: %d\n%s" % (number, event) for number, event in enumerate(events)]
    assert asyncio.run(run()) == expected


async def test_an_answer_that_never_began_is_an_error_for_all() -> None:
    log = ReplayLog()
    waiting = asyncio.ensure_future(_all(log.read()))
    await asyncio.sleep(0)
    log.complete(ApiError(503, "gone"))
    for reader in (waiting, _all(log.read())):
        with pytest.raises(ApiError, match="gone"):
            await reader


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=12), data=st.data())
def test_updates_by_token_do_not_depend_on_steps(tokens: list[int], data: st.DataObject) -> None:
    """However tokens were batched, also with the end in a step of its own, the parts are the same."""
    held_back = data.draw(st.sampled_from(["", "!"]), label="text held back to the end")

    def batched(sizes: list[int], *, separate_end: bool) -> list[Update]:
        updates, at = [], 0
        for size in [*sizes, len(tokens)]:
            part = tokens[at : at + size]
            at += len(part)
            if part:
                pieces = [str(token) for token in part]
                updates.append(Update(0, "".join(pieces), part, [], pieces=pieces))
        last = updates.pop()
        if separate_end:
            updates.append(last)
            last = Update(0, "", [], [])
        return [
            *updates,
            Update(0, last.text + held_back, last.tokens, [], finish_reason="stop", pieces=last.pieces),
        ]

    async def parts() -> list[Update]:
        sizes = data.draw(st.lists(st.integers(1, 4), max_size=12), label="steps")
        updates = batched(sizes, separate_end=data.draw(st.booleans()))
        return [part async for part in token_by_token(_of(updates))]

    got = asyncio.run(parts())
    assert got == asyncio.run(parts())
    assert [part.tokens for part in got] == [*([token] for token in tokens), []]
    assert "".join(part.text for part in got) == "".join(map(str, tokens)) + held_back


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_choices_take_turns_whoever_is_ahead(lengths: list[int], data: st.DataObject) -> None:
    delays = [data.draw(st.integers(0, 3), label="delay") for _ in lengths]

    async def choice(number: int) -> AsyncGenerator[Update, None]:
        for token in range(lengths[number]):
            for _ in range(delays[number]):
                await asyncio.sleep(0)
            yield Update(number, "", [token], [])

    async def run() -> list[tuple[int, int]]:
        merged = in_turns([choice(number) for number in range(len(lengths))])
        return [(update.tokens[0], update.choice) async for update in merged]

    expected = sorted((token, number) for number, length in enumerate(lengths) for token in range(length))
    assert asyncio.run(run()) == expected


async def _of(updates: list[Update]) -> AsyncGenerator[Update, None]:
    for update in updates:
        yield update


async def _all(parts: AsyncGenerator[bytes, None]) -> list[bytes]:
    return [part async for part in parts]
