"""`flotilla batch`: what it sends, writes, prints and exits with."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import Result
from typer.testing import CliRunner

from deployments import cli
from deployments.batch_client import BatchProgress
from deployments.batch_command import describe
from tests.deployments.batch_server import Server, good, read_output, refusal, write_input
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER


async def run(folder: Path, url: str, *options: str) -> Result:
    arguments = ["batch", str(folder / "in.jsonl"), str(folder / "out.jsonl"), "--url", url, *options]
    return await asyncio.to_thread(CliRunner().invoke, cli.app, arguments)


async def test_requests_are_answered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_API_KEY", "flotilla-key")
    write_input(tmp_path / "in.jsonl", 20)
    server = Server()
    async with server.listening() as url:
        result = await run(tmp_path, url, "--concurrency", "3")
        assert result.exit_code == 0, result.output
        assert "20 answered, 0 failed. 100 tokens in" in result.output
        again = await run(tmp_path, url)
    assert (again.exit_code, "All 20 requests have answers" in again.output) == (0, True)
    assert server.most_open <= 3
    assert len(server.asked) == 20
    lines = read_output(tmp_path / "out.jsonl")
    assert {line["custom_id"]: line["response"]["body"]["asked"] for line in lines} == {
        f"r{index}": f"p{index}" for index in range(20)
    }
    assert lines[0].keys() == {"id", "custom_id", "response", "error"}
    assert lines[0]["response"]["request_id"] == f"of {lines[0]['response']['body']['asked']}"
    path, headers, body = server.asked[0]
    assert (path, headers["Authorization"]) == ("/v1/completions", "Bearer flotilla-key")
    assert (body["priority"], body["model"], "service_tier" in body) == (10, "first", False)
    assert len({headers["Idempotency-Key"] for _, headers, _ in server.asked}) == 20


@pytest.mark.parametrize(
    ("fields", "options", "sent"),
    [
        ({}, ["--priority", "0"], {"model": "first"}),
        (
            {"model": None},
            ["--tier", "flex", "--model", "m", "--priority", "3"],
            {"model": "m", "service_tier": "flex", "priority": 3},
        ),
        (
            {"model": "own", "priority": 0, "service_tier": "fast"},
            ["--tier", "flex", "--model", "m"],
            {"model": "own", "service_tier": "fast", "priority": 0},
        ),
    ],
)
async def test_options_fill_what_bodies_leave_out(
    tmp_path: Path, fields: dict[str, Any], options: list[str], sent: dict[str, Any]
) -> None:
    write_input(tmp_path / "in.jsonl", 1, **fields)
    server = Server()
    async with server.listening() as url:
        assert (await run(tmp_path, f"{url}/v1", *options)).exit_code == 0
    assert server.asked[0][2] == {"prompt": "p0", **sent}


async def test_failures_are_written_and_asked_again(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 4)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["prompt"] == "p1":
            return refusal(422)
        if body["prompt"] == "p2":
            return web.Response(text="<p>no such page</p>", status=404)
        if body["prompt"] == "p3":
            return web.Response(text="<p>all is well</p>")
        return await good(request, body)

    server = Server(answer)
    async with server.listening() as url:
        result = await run(tmp_path, url)
        assert (result.exit_code, "1 answered, 3 failed; the same" in result.output) == (1, True)
        lines = {line["custom_id"]: line for line in read_output(tmp_path / "out.jsonl")}
        assert lines["r1"]["response"]["status_code"] == 422
        assert lines["r1"]["response"]["body"] == {"error": {"message": "no [place]"}}
        assert lines["r2"]["response"]["body"] == {"error": {"message": "<p>no such page</p>"}}
        assert lines["r3"]["response"] is None
        assert lines["r3"]["error"]["code"] == "invalid_answer"
        server.answer = good
        result = await run(tmp_path, url)
    assert (result.exit_code, "3 answered, 1 before, 0 failed" in result.output) == (0, True)
    assert Counter(body["prompt"] for _, _, body in server.asked) == {"p0": 1, "p1": 2, "p2": 2, "p3": 2}
    assert len(read_output(tmp_path / "out.jsonl")) == 7


@pytest.mark.parametrize("url", ["http://127.0.0.1:{}", "http://[::1", "ftp://127.0.0.1", "flotilla.invalid"])
async def test_a_server_that_was_never_there_is_told(tmp_path: Path, free_port: int, url: str) -> None:
    write_input(tmp_path / "in.jsonl", 3)
    result = await run(tmp_path, url.format(free_port))
    assert (result.exit_code, "cannot reach" in result.output) == (2, True), result.output
    assert "ssl" not in result.output
    assert ("no address of a server" in result.output) == url.startswith(("http://[", "ftp"))
    assert read_output(tmp_path / "out.jsonl") == []


@pytest.mark.parametrize("status", [401, 403])
async def test_a_wrong_key_ends_the_batch(tmp_path: Path, status: int) -> None:
    write_input(tmp_path / "in.jsonl", 50)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return refusal(status)

    server = Server(answer)
    async with server.listening() as url:
        result = await run(tmp_path, url, "--concurrency", "2")
    assert (result.exit_code, f"answers {status}: no [place]" in result.output) == (2, True)
    assert "FLOTILLA_API_KEY" in result.output
    assert len(server.asked) <= 2
    assert read_output(tmp_path / "out.jsonl") == []


async def test_what_one_request_may_not_is_its_own_failure(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 3)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return refusal(403) if body["prompt"] == "p1" else await good(request, body)

    async with Server(answer).listening() as url:
        result = await run(tmp_path, url, "--concurrency", "1")
    assert (result.exit_code, "2 answered, 1 failed" in result.output) == (1, True)


def test_files_are_checked_before_anything_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    write_input(file, 2)
    result = CliRunner().invoke(cli.app, ["batch", str(file), str(file)])
    assert (result.exit_code, "cannot be both" in result.output) == (2, True)
    file.write_text("{}\n")
    result = CliRunner().invoke(cli.app, ["batch", str(file), str(tmp_path / "out.jsonl")])
    assert (result.exit_code, f"{file}, line 1: " in result.output) == (2, True)
    assert not (tmp_path / "out.jsonl").exists()
    write_input(file, 2)
    result = CliRunner().invoke(cli.app, ["batch", str(file), str(tmp_path / ("o" * 300))])
    assert (result.exit_code, "cannot write" in result.output) == (2, True)


async def test_an_interrupt_leaves_whole_lines_and_goes_on(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 8)
    num_gone = 0

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal num_gone
        if body["prompt"] in ("p0", "p1", "p2"):
            return await good(request, body)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            num_gone += 1
            raise
        return web.Response()

    server = Server(answer)
    output = tmp_path / "out.jsonl"
    async with server.listening() as url:
        command = ["batch", str(tmp_path / "in.jsonl"), str(output), "--url", url, "--concurrency", "2"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deployments.cli", *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while server.num_open < 2 or len(server.asked) < 5:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        told, errors = await asyncio.wait_for(process.communicate(), 20)
        assert (process.returncode, told) == (130, b"")
        assert errors.decode().strip() == f"Interrupted; the same command goes on from {output}."
        while num_gone < 2:
            await asyncio.sleep(0.01)
        assert {line["custom_id"] for line in read_output(output)} == {"r0", "r1", "r2"}
        server.answer = good
        assert (await run(tmp_path, url)).exit_code == 0
    assert len(server.asked) == 5 + 5
    assert sorted(line["custom_id"] for line in read_output(output)) == [f"r{index}" for index in range(8)]


async def test_a_front_end_answers_all_kinds_in_the_background(
    url: str, cell: CellStandIn, tmp_path: Path
) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi", "max_tokens": 100},
        "/v1/responses": {"input": "hi"},
    }
    lines = [
        {"custom_id": path, "method": "POST", "url": path, "body": body} for path, body in bodies.items()
    ]
    lines.append({**lines[1], "custom_id": "own", "body": {"prompt": "hi", "priority": 2}})
    lines.append({**lines[1], "custom_id": "wrong", "body": {"prompt": "hi", "temperature": 9}})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = await run(tmp_path, url)
    assert (result.exit_code, "4 answered, 1 failed" in result.output) == (1, True), result.output
    assert "(the first: 400: `temperature`" in " ".join(result.output.split())
    answers = {line["custom_id"]: line["response"] for line in read_output(tmp_path / "out.jsonl")}
    chat, completion, response = (answers[path]["body"] for path in bodies)
    assert chat["choices"][0]["message"]["content"] == ANSWER
    assert completion["choices"][0]["text"] == ANSWER
    assert response["output"][0]["content"][0]["text"] == ANSWER
    assert answers["wrong"]["status_code"] == 400
    assert sorted(submit.priority for submit in cell.submissions) == [2, 10, 10, 10]


def test_a_line_tells_how_far_it_is() -> None:
    progress = BatchProgress(10, num_answered=4, num_tokens=3000)
    assert describe(progress, 2.0) == "1,500 tokens/s"
    progress = BatchProgress(10, num_failed=2, num_waiting=3, trouble="429: too\nmany " + "x" * 90)
    assert describe(progress, 1.0).startswith("2 failed · 0 tokens/s · 3 waiting (429: too many xxx")
    assert describe(progress, 1.0).endswith("xx…)")
