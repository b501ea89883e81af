"""A worker that computes a call can see the next one."""

from __future__ import annotations

import threading
import time

from cluster.step_client import StepClient
from cluster.step_server import StepServer
from tests.cluster.test_step_transport import TOKEN, until


async def test_who_computes_a_call_sees_the_next_one_and_it_is_answered_once() -> None:
    seen: list[tuple[bytes, bytes | None]] = []
    begun = threading.Event()

    def compute(data: bytes) -> bytes:
        begun.set()
        until = time.monotonic() + (5.0 if data == b"first" else 0.05)
        while (following := server.waiting()) is None and time.monotonic() < until:
            time.sleep(0.001)
        assert server.waiting() is following
        seen.append((data, following))
        return data.upper()

    server = StepServer(compute, TOKEN, "127.0.0.1", idle=lambda: False)
    answers: list[bytes] = []
    client = await StepClient.connect("w", server.address, TOKEN, answers.append, lambda: None)
    client.send(b"first")
    await until(begun.is_set)
    client.send(b"second")
    await until(lambda: len(answers) == 2)
    assert answers == [b"FIRST", b"SECOND"]
    assert seen == [(b"first", b"second"), (b"second", None)]
    await client.close()
    await until(lambda: not server.is_connected)
    assert server.waiting() is None
    server.close()
