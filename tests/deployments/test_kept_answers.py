"""Answers by their keys: what is held of each, and who attaches to which."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from functools import partial

from cluster.idempotency_config import IdempotencyConfig
from deployments.idempotency import HEADER, Answers, Key
from deployments.replay_log import ReplayLog
from deployments.request_context import RequestContext


async def _produce(log: ReplayLog, number: int) -> bool:
    for event in range(12):
        log.add_events(f"data: event {event} of answer {number} {'x' * 200}\n\n".encode())
        await asyncio.sleep(0)
    return True


async def _ask_directly(answers: Answers, number: int) -> weakref.ref[RequestContext]:
    """One request within its context, as a front end answers it."""
    request = RequestContext({"request_id": f"r{number}", "connection": bytearray(20_000)})
    key = Key(name=f"{number:064x}", field=HEADER, body=f"{number:064x}")
    with request.entered():
        follower = answers.attach(key, partial(_produce, number=number))
        assert len([part async for part in follower.parts()]) == 12
    return weakref.ref(request)


async def test_what_is_counted_of_an_answer_is_what_is_held() -> None:
    """Its request and connection are not; the bound on bytes would be of no use."""
    answers = Answers(IdempotencyConfig())
    ask = partial(_ask_directly, answers)
    for number in range(20):  # what is made once
        await asyncio.create_task(ask(number))
    gc.collect()
    counted_before = answers.num_bytes
    tracemalloc.start()
    try:
        requests = [await asyncio.create_task(ask(number)) for number in range(20, 220)]
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted = answers.num_bytes - counted_before
    assert len(answers) == 220
    assert not any(request() for request in requests)
    assert 0.8 * counted < held < 1.2 * counted
    await answers.close()


async def test_who_comes_while_an_abandoned_answer_is_ended_gets_one_of_its_own() -> None:
    """It attached to the one being ended, and was told that its request was cancelled."""
    answers = Answers(IdempotencyConfig(grace_s=0.01))
    is_ending = asyncio.Event()

    async def slow_to_end(log: ReplayLog) -> bool:
        try:
            await asyncio.sleep(30)
        finally:
            is_ending.set()
            await asyncio.sleep(0.05)  # its cell is being told
        return True

    async def whole(log: ReplayLog) -> bool:
        log.add(b"answer")
        return True

    key = Key("name", HEADER, "body")
    answers.attach(key, slow_to_end).close()
    await asyncio.wait_for(is_ending.wait(), 3)
    assert [part async for part in answers.attach(key, whole).parts()] == [b"answer"]
    await asyncio.sleep(0.1)
    assert len(answers) == 1, "the new answer is kept"
    await answers.close()
