"""Batches sent to servers that are full, break off, go away and come back."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections import Counter
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from deployments.batch_client import (
    BatchOptions,
    BatchProgress,
    BatchStopped,
    Window,
    idempotency_key,
    retry_after,
    send_batch,
)
from deployments.batch_file import BatchOutput, read_requests
from tests.deployments.batch_server import Server, good, read_output, refusal, write_input
from tests.examples import examples

#: Waits of seconds are for people.
QUICK = (0.01, 0.02)


async def send(folder: Path, url: str, concurrency: int = 4) -> BatchProgress:
    """As the command does, but quick to try again."""
    with BatchOutput(folder / "out.jsonl") as output:
        wanted = [one for one in read_requests(folder / "in.jsonl") if one.custom_id not in output.answered]
        progress = BatchProgress(len(wanted))
        options = BatchOptions(url=url, concurrency=concurrency, backoff_s=QUICK)
        await send_batch(wanted, output.append, options, progress)
    return progress


@pytest.mark.parametrize("status", [429, 503, 502, 504])
@pytest.mark.parametrize("after", ["0.05", None])
async def test_a_server_that_is_full_or_away_is_asked_again(
    tmp_path: Path, status: int, after: str | None
) -> None:
    write_input(tmp_path / "in.jsonl", 12)
    refused: Counter[str] = Counter()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        refused[body["prompt"]] += 1
        return refusal(status, after) if refused[body["prompt"]] <= 3 else await good(request, body)

    server = Server(answer)
    async with server.listening() as url:
        progress = await send(tmp_path, url)
    assert (progress.num_answered, progress.num_failed, progress.num_waiting) == (12, 0, 0)
    assert set(refused.values()) == {4}
    keys = {(body["prompt"], headers["Idempotency-Key"]) for _, headers, body in server.asked}
    assert len(keys) == 12


async def test_others_do_not_rush_to_a_full_server(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 200)
    opens_at = time.monotonic() + 0.5

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return refusal(429, "0.1") if time.monotonic() < opens_at else await good(request, body)

    server = Server(answer)
    async with server.listening() as url:
        assert (await send(tmp_path, url, concurrency=16)).num_answered == 200
    # 16, half of them, and so on; the same that were refused first.
    assert len(server.asked) - 200 <= 16 + 8 + 4 + 2 + 1 + 2


@pytest.mark.parametrize("part", ["nothing", "half"])
async def test_a_broken_connection_is_no_failure(tmp_path: Path, part: str) -> None:
    write_input(tmp_path / "in.jsonl", 6)
    broken: set[str] = set()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["prompt"] in broken:
            return await good(request, body)
        broken.add(body["prompt"])
        assert request.transport is not None
        if part == "half":
            response = web.StreamResponse(headers={"Content-Length": "100"})
            await response.prepare(request)
            await response.write(b'{"id": ')
        request.transport.abort()
        return web.Response()

    server = Server(answer)
    async with server.listening() as url:
        assert (await send(tmp_path, url)).num_answered == 6
    keys = Counter(headers["Idempotency-Key"] for _, headers, _ in server.asked)
    assert set(keys.values()) == {2}


async def test_a_server_that_goes_and_comes_back_answers_all(tmp_path: Path, free_port: int) -> None:
    write_input(tmp_path / "in.jsonl", 30)
    goes = asyncio.Event()
    served = 0

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal served
        served += 1
        if served > 10:
            goes.set()
            await asyncio.sleep(60)
        return await good(request, body)

    async with Server(answer).listening(free_port) as url:
        sending = asyncio.create_task(send(tmp_path, url))
        await goes.wait()
    await asyncio.sleep(0.1)
    assert not sending.done()
    async with Server().listening(free_port):
        assert (await sending).num_answered == 30
    assert len(read_output(tmp_path / "out.jsonl")) == 30


async def test_a_model_is_asked_for_until_the_server_can_tell(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 1)
    server = Server()
    told = [web.json_response({"data": [{"id": "late"}]}), refusal(503, "0.02")]
    server.models = told.pop
    async with server.listening() as url:
        await send(tmp_path, url)
    assert server.asked[0][2]["model"] == "late"
    write_input(tmp_path / "in.jsonl", 2)
    server.models = lambda: refusal(404)  # a server without the list is a server
    async with server.listening() as url:
        await send(tmp_path, url)
    assert "model" not in server.asked[1][2]


@examples(80)
@given(data=st.data(), failing=st.sets(st.integers(0, 4)))
def test_wherever_it_was_interrupted_each_request_has_one_answer(
    data: st.DataObject, failing: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_input(folder / "in.jsonl", 5)
        asyncio.run(_interrupted(folder, {f"p{index}" for index in failing}, data))


async def _interrupted(folder: Path, failing: set[str], data: st.DataObject) -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return refusal(500) if body["prompt"] in failing else await good(request, body)

    output = folder / "out.jsonl"
    server = Server(answer)
    async with server.listening() as url:
        await send(folder, url)
        whole = output.read_bytes()
        output.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        with BatchOutput(output) as kept:
            answered = kept.answered
        server.asked.clear()
        server.answer = good
        await send(folder, url)
        asked = [body["prompt"].replace("p", "r") for _, _, body in server.asked]
        everything = {f"r{index}" for index in range(5)}
        assert sorted(asked) == sorted(everything - answered)
        good_lines = Counter(
            line["custom_id"] for line in read_output(output) if line["response"]["status_code"] == 200
        )
        assert good_lines == dict.fromkeys(everything, 1)
        assert (await send(folder, url)).total == 0


def test_a_window_halves_once_for_what_was_sent_together() -> None:
    window = Window(16)
    for _ in range(5):
        window.refused(0)
    assert (window.limit, window.round) == (8, 1)
    for expected in (4, 2, 1, 1):
        window.refused(window.round)
        assert window.limit == expected
    for _ in range(20):
        window.answered()
    assert window.limit == 16


def test_servers_may_say_when_in_seconds_or_by_a_date() -> None:
    assert [retry_after(text) for text in ("", "soon", "0", "-3", "nan", formatdate(0))] == [None] * 6
    for year in ("0", "99999", "9" * 30):
        assert retry_after(f"Wed, 21 Oct {year} 07:28:00 GMT") is None
    assert (retry_after("7"), retry_after("1e9"), retry_after("inf")) == (7.0, 3600.0, 3600.0)
    in_a_minute = retry_after(formatdate(time.time() + 60, usegmt=True))
    assert in_a_minute is not None
    assert 55 < in_a_minute <= 61


def test_keys_tell_requests_apart(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 2)
    first, second = read_requests(tmp_path / "in.jsonl")
    body = {"prompt": "\ud83d naïve"}
    keys = {idempotency_key(first, body), idempotency_key(second, body), idempotency_key(first, {})}
    assert len(keys) == 3
    assert all(len(key) <= 255 and key.isascii() and key.isprintable() for key in keys)
    assert idempotency_key(first, {"a": 1, "b": 2}) == idempotency_key(first, {"b": 2, "a": 1})


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("status", [200, 400])
async def test_numbers_that_are_none_leave_a_file_that_can_be_gone_on_with(
    tmp_path: Path, number: str, status: int
) -> None:
    write_input(tmp_path / "in.jsonl", 2)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["prompt"] == "p1":
            return await good(request, body)
        return web.Response(text=f'{{"logprob": {number}}}', content_type="application/json", status=status)

    async with Server(answer).listening() as url:
        progress = await send(tmp_path, url)
        again = await send(tmp_path, url)
    assert (progress.num_answered, progress.num_failed) == (1, 1)
    assert (again.total, again.num_failed) == (1, 1)
    assert number in again.failure


async def test_another_protocol_is_no_server(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 1)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00")  # as of a port for gRPC
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, family=socket.AF_INET)
    with pytest.raises(BatchStopped, match="cannot reach"):
        await send(tmp_path, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()


async def test_an_address_that_sends_on_is_not_sent_requests(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 3)
    behind, before = Server(), Server()
    async with behind.listening() as url, before.listening() as moved:

        def models() -> web.Response:
            raise web.HTTPMovedPermanently(f"{url}/v1/models")

        before.models = models
        with pytest.raises(BatchStopped, match=rf"sends on to {url}/v1/models: .* --url {url}$"):
            await send(tmp_path, moved)
    assert not behind.asked
    assert not read_output(tmp_path / "out.jsonl")


@pytest.mark.parametrize("status", [301, 302, 303])
async def test_what_a_get_brings_is_no_answer_to_a_request(tmp_path: Path, status: int) -> None:
    write_input(tmp_path / "in.jsonl", 1, model="m")

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": "/v1/models"})

    async with Server(answer).listening() as url:
        progress = await send(tmp_path, url)
    assert (progress.num_answered, progress.num_failed) == (0, 1)
    (line,) = read_output(tmp_path / "out.jsonl")
    assert line["response"] is None
    assert line["error"]["code"] == "moved"
    assert "/v1/models" in line["error"]["message"]


@pytest.mark.parametrize("status", [307, 308])
async def test_a_request_that_is_sent_on_as_it_is_has_its_answer(tmp_path: Path, status: int) -> None:
    write_input(tmp_path / "in.jsonl", 3)
    behind = Server()
    async with behind.listening() as url:

        async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.Response(status=status, headers={"Location": f"{url}{request.path}"})

        async with Server(answer).listening() as moved:
            progress = await send(tmp_path, moved)
    assert progress.num_answered == len(behind.asked) == 3
