"""Step transport and front-end port over real sockets: order, tokens, losses."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from cluster import step_server, transport
from cluster.client_server import ClientServer
from cluster.step_client import StepClient
from cluster.step_server import StepServer
from cluster.stream_messages import Cancel, ClientMessage, Rejected
from cluster.transport import FrameTooLarge, frame, read_frame, take_frames, write_frame
from engine.wire import encode

TOKEN = b"secret"


async def until(condition, seconds: float = 5.0) -> None:  # type: ignore[no-untyped-def]
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("busy", [False, True])
async def test_answers_come_back_in_the_order_of_the_calls(busy: bool) -> None:
    server = StepServer(lambda data: data[::-1], TOKEN, "127.0.0.1", busy_polling=busy)
    answers: list[bytes] = []
    lost: list[bool] = []
    client = await StepClient.connect(
        "w", server.address, TOKEN, answers.append, lambda: lost.append(True), busy_polling=busy
    )
    calls = [bytes([i]) * (1 + 997 * i) + b"x" for i in range(50)]
    for call in calls:
        client.send(call)
    await until(lambda: len(answers) == len(calls))
    assert answers == [call[::-1] for call in calls]
    await client.close()
    assert not lost, "closing is not a loss"
    server.close()


async def test_idle_work_is_done_between_calls_and_ends_for_the_next() -> None:
    log: list[str] = []

    def idle() -> bool:
        log.append("idle")
        time.sleep(0.002)
        return log.count("idle") < 1000

    def answer(data: bytes) -> bytes:
        log.append("call")
        return data

    server = StepServer(answer, TOKEN, "127.0.0.1", idle=idle)
    answers: list[bytes] = []
    client = await StepClient.connect("w", server.address, TOKEN, answers.append, lambda: None)
    for number in range(1, 4):
        await until(lambda: not log or log[-1] == "idle")
        client.send(b"x")
        await until(lambda expected=number: len(answers) == expected)
    await until(lambda: log[-1] == "idle")
    assert [entry for entry, after in zip(log, [*log[1:], ""], strict=True) if entry != after] == [
        "call",
        "idle",
    ] * 3
    await client.close()
    server.close()


async def test_signs_of_life_come_while_a_call_is_computed_and_end_with_the_worker() -> None:
    computing, go_on = threading.Event(), threading.Event()

    def compute(data: bytes) -> bytes:
        computing.set()
        go_on.wait(10)
        return data

    server = StepServer(compute, TOKEN, "127.0.0.1", heartbeat_s=0.02)
    answers: list[bytes] = []
    client = await StepClient.connect("w", server.address, TOKEN, answers.append, lambda: None)
    assert client.signs(time.monotonic()).call_s is None
    for _ in range(2):
        client.send(b"x" * 200_000)
    await until(computing.is_set)
    await asyncio.sleep(0.3)
    signs = client.signs(time.monotonic(), predicted_s=0.01)
    assert signs.heard_s < 0.2
    assert signs.call_s is not None
    assert signs.call_s >= 0.3
    assert (signs.num_answered, signs.predicted_s) == (0, 0.01)
    go_on.set()
    await until(lambda: len(answers) == 2)
    assert all(answer == b"x" * 200_000 for answer in answers), "a sign of life in the midst of an answer"
    signs = client.signs(time.monotonic())
    assert (signs.call_s, signs.num_answered) == (None, 2)
    await client.close()
    server.close()


async def test_the_second_of_two_calls_begins_when_the_first_is_answered() -> None:
    server = StepServer(lambda data: (time.sleep(0.2), data)[1], TOKEN, "127.0.0.1")
    answers: list[bytes] = []
    client = await StepClient.connect("w", server.address, TOKEN, answers.append, lambda: None)
    client.send(b"one")
    client.send(b"two")
    await until(lambda: answers == [b"one"])
    call_s = client.signs(time.monotonic()).call_s
    assert call_s is not None
    assert call_s < 0.15
    await client.close()
    server.close()


async def test_a_worker_that_dies_is_noticed_at_once() -> None:
    def die(data: bytes) -> bytes:
        raise ConnectionError("the process is gone")

    server = StepServer(die, TOKEN, "127.0.0.1")
    lost: list[bool] = []
    client = await StepClient.connect("w", server.address, TOKEN, lambda _: None, lambda: lost.append(True))
    client.send(b"call")
    await until(lambda: bool(lost))
    server.close()


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT])
def test_a_scheduler_whose_machine_is_gone_leaves_the_port_to_the_next(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = threading.Event()

    def answer(data: bytes) -> bytes:
        gone.set()  # the next read fails as that of a connection whose other side does not acknowledge
        return data

    read = step_server._read_exactly

    def read_exactly(connection: socket.socket, length: int, until: float | None) -> bytes:
        if gone.is_set():
            gone.clear()
            raise OSError(number, os.strerror(number))
        return read(connection, length, until)

    monkeypatch.setattr(step_server, "_read_exactly", read_exactly)
    server = StepServer(answer, TOKEN, "127.0.0.1")
    for _ in range(2):
        with socket.create_connection(server.address, timeout=5) as scheduler:
            scheduler.sendall(frame(TOKEN) + frame(b"hello"))
            assert scheduler.recv(100) == frame(b"hello")
            assert scheduler.recv(100) == b""
    assert server.close(5)


async def test_an_answer_that_cannot_be_handled_counts_as_a_loss() -> None:
    def stumble(data: bytes) -> None:
        raise ValueError("a bug")

    server = StepServer(lambda data: data, TOKEN, "127.0.0.1")
    lost: list[bool] = []
    client = await StepClient.connect("w", server.address, TOKEN, stumble, lambda: lost.append(True))
    client.send(b"call")
    await until(lambda: bool(lost))
    server.close()


async def test_a_wrong_token_gets_no_answer_and_the_next_client_does() -> None:
    server = StepServer(lambda data: data, TOKEN, "127.0.0.1")
    answers: list[bytes] = []
    lost: list[str] = []
    bad = await StepClient.connect("b", server.address, b"guess", answers.append, lambda: lost.append("bad"))
    bad.send(b"hello")
    await until(lambda: lost == ["bad"])
    assert not answers
    good = await StepClient.connect("g", server.address, TOKEN, answers.append, lambda: lost.append("good"))
    good.send(b"hello")
    await until(lambda: answers == [b"hello"])
    await good.close()
    server.close()


def test_who_never_shows_the_token_is_cut_off_and_the_scheduler_behind_is_served() -> None:
    server = StepServer(lambda data: data, TOKEN, "127.0.0.1", token_s=0.2)
    silent = socket.create_connection(server.address)
    with socket.create_connection(server.address, timeout=5) as scheduler:
        for data in (TOKEN, b"hello"):
            scheduler.sendall(frame(data))
        assert scheduler.recv(100) == frame(b"hello")
        assert silent.recv(1) == b""
        # Who is admitted may be silent for as long as it likes.
        time.sleep(0.3)
        scheduler.sendall(frame(b"again"))
        assert scheduler.recv(100) == frame(b"again")
    silent.close()
    assert server.close(5)


def test_a_byte_of_the_token_now_and_then_does_not_hold_the_port() -> None:
    server = StepServer(lambda data: data, TOKEN, "127.0.0.1", token_s=0.2)
    with socket.create_connection(server.address, timeout=0.02) as slow:
        for byte in frame(bytes(200))[:100]:
            slow.sendall(bytes([byte]))
            try:
                assert slow.recv(1) == b""
                break
            except TimeoutError:
                continue
        else:
            raise AssertionError("each byte began the time anew")
    assert server.close(5)


@pytest.mark.parametrize("waits_in_backlog", [False, True])
def test_a_port_is_closed_although_somebody_who_says_nothing_is_connected(*, waits_in_backlog: bool) -> None:
    server = StepServer(lambda data: data, TOKEN, "127.0.0.1", token_s=60)
    scheduler = socket.create_connection(server.address) if waits_in_backlog else None
    if scheduler is not None:
        scheduler.sendall(frame(TOKEN) + frame(b"hello"))
        assert scheduler.recv(100) == frame(b"hello")
    with socket.create_connection(server.address, timeout=5) as stray:
        if scheduler is not None:
            scheduler.close()
        time.sleep(0.05)  # until it is accepted
        assert server.close(5), "the worker could not be taken over"
        with contextlib.suppress(ConnectionResetError):  # of the backlog
            assert stray.recv(1) == b""
    assert not server.is_connected


async def _front_end(
    address: tuple[str, int], token: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    write_frame(writer, token)
    assert await read_frame(reader) == b"", "who is admitted is told so"
    return reader, writer


async def test_front_ends_are_told_apart_and_their_loss_is_reported() -> None:
    got: list[tuple[str, ClientMessage]] = []
    lost: list[str] = []
    server = ClientServer(TOKEN, lambda name, message: got.append((name, message)), lost.append)
    address = await server.start("127.0.0.1")
    readers = []
    for request_id in ("one", "two"):
        reader, writer = await _front_end(address, TOKEN)
        write_frame(writer, encode(Cancel(request_id)))
        readers.append((reader, writer))
        await until(lambda want=len(readers): len(got) == want)
    (first, _), (second, message) = got
    assert first != second
    assert message == Cancel("two")
    server.send(second, Rejected(request_id="two", code="queue_full", message="full"))
    while not (data := await read_frame(readers[1][0])):
        pass  # a sign of life
    assert b"queue_full" in data
    readers[0][1].close()
    await until(lambda: lost == [first])
    server.send(first, Rejected(request_id="one", code="queue_full", message="full"))  # dropped, no error
    await server.close()


async def test_a_message_that_is_too_long_ends_its_front_end_s_connection_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever sent it took the error for the loss of the worker whose answer it told."""
    lost: list[str] = []
    server = ClientServer(TOKEN, lambda name, message: lost.append(f"{name} is there"), lost.append)
    reader, writer = await _front_end(await server.start("127.0.0.1"), TOKEN)
    write_frame(writer, encode(Cancel("one")))
    await until(lambda: len(lost) == 1)
    name = lost.pop().removesuffix(" is there")
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 1000)
    server.send(name, Rejected(request_id="one", code="queue_full", message="full " * 1000))
    await until(lambda: lost == [name])
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:  # signs of life, at most
            assert await asyncio.wait_for(read_frame(reader), 5) == b""
    await server.close()


@pytest.mark.parametrize("frames", [[b"guess"], [TOKEN, b"\xc1 not a message"]])
async def test_who_does_not_speak_the_protocol_is_cut_off(frames: list[bytes]) -> None:
    server = ClientServer(TOKEN, lambda name, message: None, lambda name: None)
    address = await server.start("127.0.0.1")
    reader, writer = await asyncio.open_connection(*address)
    for one in frames:
        write_frame(writer, one)
    if frames[0] == TOKEN:
        assert await read_frame(reader) == b"", "who is admitted is told so"
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(read_frame(reader), 5)
    writer.close()
    await server.close()


async def test_a_stray_that_sends_no_token_is_cut_off_and_nothing_is_kept_of_it() -> None:
    told: list[str] = []
    server = ClientServer(TOKEN, lambda name, message: None, told.append, token_s=0.1)
    address = await server.start("127.0.0.1")
    tasks = asyncio.all_tasks()
    reader, writer = await _front_end(address, TOKEN)
    stray, its_writer = await asyncio.open_connection(*address)
    assert await asyncio.wait_for(stray.read(), 5) == b""
    await until(lambda: len(asyncio.all_tasks() - tasks) == 1)
    assert not told
    assert await asyncio.wait_for(read_frame(reader), 5) == b"", (
        "a front end that was admitted lost its place"
    )
    for one in (writer, its_writer):
        one.close()
    await server.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_frame_for_somebody_who_is_gone_is_dropped(
    run: Callable[[Coroutine[object, object, None]], None],
) -> None:
    async def send() -> None:
        accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        server = await asyncio.start_server(lambda _, writer: accepted.put(writer), "127.0.0.1", 0)
        client = socket.create_connection(server.sockets[0].getsockname())
        writer = await accepted.get()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # with a reset, as the kernel does for a process that was killed
        for _ in range(20):
            write_frame(writer, b"token")
            await asyncio.sleep(0.005)
        assert writer.is_closing()
        server.close()

    run(send())


async def test_a_call_is_on_its_way_before_the_callback_that_sent_it_ends() -> None:
    heard = threading.Event()
    server = StepServer(lambda data: (heard.set(), data)[1], TOKEN, "127.0.0.1")
    client = await StepClient.connect("w", server.address, TOKEN, lambda _: None, lambda: None)
    client.send(b"call")
    # The event loop is not given a turn meanwhile, as in a scheduler that goes on to learn.
    assert await asyncio.sleep(0, heard.wait(5)), "it waits for the loop"
    await client.close()
    server.close()


async def test_a_call_that_the_connection_does_not_take_at_once_arrives_whole() -> None:
    computing, go_on = threading.Event(), threading.Event()

    def compute(data: bytes) -> bytes:
        computing.set()
        go_on.wait(10)
        return data[:1] + len(data).to_bytes(4, "big")

    server = StepServer(compute, TOKEN, "127.0.0.1")
    answers: list[bytes] = []
    client = await StepClient.connect("w", server.address, TOKEN, answers.append, lambda: None)
    sizes = [1, 12_000_000, 3, 9_000_000]  # more than the kernel's buffers hold
    for number, size in enumerate(sizes):
        client.send(bytes([number]) * size)
    await until(computing.is_set)
    go_on.set()
    await until(lambda: len(answers) == len(sizes), 20)
    assert answers == [bytes([number]) + size.to_bytes(4, "big") for number, size in enumerate(sizes)]
    await client.close()
    server.close()


@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_frames_are_taken_however_they_are_cut(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, frames))
    received, taken = bytearray(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += stream[:size]
        stream = stream[size:]
        taken += list(take_frames(received))
    assert taken == frames
    assert not received
    with pytest.raises(FrameTooLarge):
        list(take_frames(bytearray(b"\xff\xff\xff\xff")))
