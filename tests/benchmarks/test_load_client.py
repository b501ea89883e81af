"""The streaming client and `flotilla bench serve` against a server whose answers are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks import serve
from benchmarks.engine_under_test import Task
from benchmarks.http_engine import HttpEngine
from benchmarks.load_client import LoadClient, Outcome, _take_chunk, run_load
from benchmarks.objectives import Slo, parse_slos
from benchmarks.prompts import Prompt
from benchmarks.workload import BenchRequest
from tests.benchmarks.fake_server import FakeServer, serving, serving_in_a_thread


def request(text: str = "hello", index: int = 0, arrival_s: float | None = None) -> BenchRequest:
    return BenchRequest(index, Prompt("code", text=text), max_tokens=8, arrival_s=arrival_s)


async def test_stream_is_recorded() -> None:
    server = FakeServer(lambda body: ["one ", "two ", "three"], pause_s=0.02)
    async with serving(server) as url, LoadClient(url + "/v1", "fake") as client:
        outcome = await client.send(request())
    assert outcome.is_ok, outcome.error
    assert outcome.text == "one two three"
    assert outcome.finish_reason == "stop"
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (3, 6)
    assert len(outcome.chunk_ms) == 3
    assert outcome.ttft_ms is not None
    assert outcome.e2e_ms is not None
    assert 15.0 < outcome.ttft_ms < outcome.e2e_ms
    assert outcome.e2e_ms > 55.0
    assert outcome.metrics is not None
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert "slo" not in server.bodies[0]


async def test_chat_role_chunk_is_not_the_first_token() -> None:
    server = FakeServer(lambda body: ["hi"], pause_s=0.05)
    chat = BenchRequest(
        0, Prompt("chat", messages=({"role": "user", "content": "q"},)), 4, slo=Slo(tpot_ms=20.0)
    )
    async with serving(server) as url, LoadClient(url, "fake") as client:
        outcome = await client.send(chat)
    assert outcome.text == "hi"
    assert outcome.ttft_ms is not None
    assert outcome.ttft_ms > 45.0
    assert server.bodies[0]["slo"] == {"tpot_ms": 20.0}


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_the_first_token_may_be_a_thought_or_a_call(delta: dict[str, object]) -> None:
    """What no text shows would leave a time per token of 0: first and last would come together."""
    outcome = Outcome(request())
    _take_chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, outcome, [], 1.0)
    _take_chunk({"choices": [{"delta": delta}]}, outcome, [], 10.0)
    _take_chunk({"choices": [{"delta": {}, "finish_reason": "length"}]}, outcome, [], 30.0)
    outcome.num_output_tokens = 3
    assert (outcome.ttft_ms, outcome.e2e_ms, outcome.tpot_ms) == (10.0, 30.0, 10.0)


async def test_errors_are_recorded() -> None:
    server = FakeServer(lambda body: ["a", "<cut>"] if body["prompt"] == "cut" else ["a"])
    async with serving(server) as url, LoadClient(url, "fake") as client:
        refused = await client.send(request("refuse"))
        cut = await client.send(request("cut"))
    assert (refused.status, refused.error) == (429, "HTTP 429: queue full")
    assert "ended early" in cut.error
    async with LoadClient(url, "fake") as client:
        gone = await client.send(request())
    assert gone.status == 0
    assert "Connect" in gone.error


@pytest.mark.parametrize(
    "data",
    [
        b"{no JSON",
        b"[1]",
        b'{"choices": 5}',
        b'{"choices": [{"delta": "text"}]}',
        b'{"choices": [], "usage": {"completion_tokens": "many"}}',
        b'{"choices": [{"text": "' + b"x" * 2_000_000 + b'"}]}',
    ],
    ids=lambda data: data[:50],
)
async def test_a_stream_that_cannot_be_read_is_one_request_s_failure(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(self: FakeServer, http: web.Request) -> web.Response:
        return web.Response(body=b"data: " + data + b"\n\n", content_type="text/event-stream")

    monkeypatch.setattr(FakeServer, "generate", generate)
    async with serving(FakeServer(lambda body: [])) as url, LoadClient(url, "fake") as client:
        outcome = await client.send(request())
    assert outcome.error.startswith("unreadable stream: ")
    assert len(outcome.error) <= 300


def test_an_error_that_is_null_is_none() -> None:
    outcome = Outcome(request())
    chunk = {
        "choices": [{"text": "a", "finish_reason": "stop"}],
        "error": None,
        "metrics": ["of another kind"],
    }
    _take_chunk(chunk | {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}, outcome, [], 1.0)
    assert (outcome.error, outcome.metrics, outcome.num_output_tokens) == ("", None, 2)


async def test_closed_loop_bounds_concurrency_and_reuses_connections() -> None:
    server = FakeServer(lambda body: ["a"], pause_s=0.01)
    async with serving(server) as url, LoadClient(url, "fake") as client:
        result = await run_load(client, [request(index=n) for n in range(12)], max_concurrency=3)
    assert server.most_at_once == 3
    assert len(server.num_connections) <= 3
    assert [outcome.request.index for outcome in result.outcomes] == list(range(12))
    assert 0.0 <= result.client_cpu_share <= 1.5


async def test_open_loop_keeps_arrival_times() -> None:
    server = FakeServer(lambda body: ["a"])
    async with serving(server) as url, LoadClient(url, "fake") as client:
        await client.send(request())
        result = await run_load(client, [request(index=n, arrival_s=0.1 * n) for n in range(3)])
    assert [outcome.sent_s for outcome in result.outcomes] == pytest.approx([0.0, 0.1, 0.2], abs=0.05)


async def test_serve_measures_the_baseline_without_speculation(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(json.dumps({"domain": d, "prompt": d}) for d in ("code", "chat") for _ in range(5))
    )
    server = FakeServer(lambda body: ["a ", "b ", "c"], pause_s=0.005)
    async with serving(server) as url:
        record = await serve.run(
            serve.ServeOptions(
                url=url,
                source=str(path),
                mix="code=60,chat=40",
                num_requests=10,
                slos=parse_slos(["code:1000x", "chat:tpot=0.001"]),
                baseline_requests=2,
                details=True,
            )
        )
    off = [body for body in server.bodies if "speculation" in body]
    assert len(off) == 4
    assert len(server.bodies) == 2 + 4 + 10
    total, (chat, code) = record["report"]["total"], record["report"]["by_class"]
    assert (total["num_requests"], total["num_errors"]) == (10, 0)
    assert (code["attainment"], chat["attainment"]) == (1.0, 0.0)
    assert total["attainment"] == pytest.approx(0.6)
    assert total["receipts"]["drafters"] == {"small": 40}
    assert record["model"] == "fake"
    assert len(record["requests"]) == 10
    json.dumps(record, default=str)


def of_two_classes(folder: Path, each: int) -> Path:
    """A file with so many prompts of each."""
    path = folder / "prompts.jsonl"
    rows = [{"domain": kind, "prompt": f"{kind} {n}"} for kind in ("code", "chat") for n in range(each)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


async def test_what_is_asked_before_the_load_is_not_asked_again_in_it(tmp_path: Path) -> None:
    """It would be in the server's prefix cache; and so would warm-ups in the baseline."""
    path = of_two_classes(tmp_path, 9)
    server = FakeServer(lambda body: ["a ", "b "])
    async with serving(server) as url:
        slos = parse_slos(["code:ttft=2x", "chat:1000x"])
        options = serve.ServeOptions(url=url, source=str(path), num_requests=10, slos=slos, max_tokens=5)
        await serve.run(replace(options, baseline_requests=3))
    asked = [body["prompt"] for body in server.bodies]
    assert len(asked) == len(set(asked)) == 2 + 6 + 10
    assert {body["max_tokens"] for body in server.bodies} == {5}


async def test_as_many_warm_ups_as_asked_for_are_sent_the_classes_in_turn(tmp_path: Path) -> None:
    path = of_two_classes(tmp_path, 20)
    server = FakeServer(lambda body: ["a ", "b "])
    async with serving(server) as url:
        slos = parse_slos(["code:ttft=2x", "chat:1000x"])
        options = serve.ServeOptions(url=url, source=str(path), num_requests=10, slos=slos, num_warmups=7)
        await serve.run(replace(options, baseline_requests=3))
    asked = [body["prompt"] for body in server.bodies]
    assert len(asked) == len(set(asked)) == 7 + 6 + 10
    assert sorted(prompt.split()[0] for prompt in asked[:7]) == ["chat"] * 3 + ["code"] * 4
    assert all("speculation" not in body for body in server.bodies[:7])


def test_two_engines_of_one_server_both_find_their_prompts_read() -> None:
    """Else whoever is asked second finds them in the prefix cache, and mostly that is ours."""
    server = FakeServer(lambda body: ["a "] * body["max_tokens"])
    tasks = [Task("code", [n, n + 1], 3) for n in range(4)]
    with serving_in_a_thread(server) as url:
        engine = HttpEngine("plain", url, "fake", serve.SPECULATION_OFF, reads_first=True, api_key="sk-a")
        result = engine.run(tasks, 2)
        engine.close()
    assert [body["max_tokens"] for body in server.bodies] == [1] * 4 + [3] * 4
    assert sorted(body["prompt"] for body in server.bodies[:4]) == [task.tokens for task in tasks]
    assert server.keys == ["Bearer sk-a"] * 8
    # What is read first is not in the figures.
    assert len(result.outputs) == 4
    assert len(engine.outcomes[2]) == 4


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"body": b"{}"}, "answers 200: {}"),
        ({"body": b"[]"}, "answers 200: []"),
        ({"body": b'{"data": []}'}, "answers 200: "),
        ({"body": b'{"data": [{"name": "m"}]}'}, "answers 200: "),
        ({"body": b"<p>hello</p>"}, "answers 200: <p>hello</p>"),
        ({"body": b'{"error": {"message": "no key"}}', "status": 401}, "answers 401: no key"),
        ({"body": b"404", "status": 404}, "answers 404: 404"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_server_that_lists_no_models_is_told(
    answer: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def models(self: FakeServer, request: web.Request) -> web.Response:
        return web.Response(**answer)

    monkeypatch.setattr(FakeServer, "models", models)
    async with serving(FakeServer(lambda body: [])) as url:
        with pytest.raises(RuntimeError, match=r"/v1/models lists no models; it .*") as caught:
            await serve.run(serve.ServeOptions(url=url))
    assert told in str(caught.value)


async def test_an_address_that_is_none_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"cannot reach http://127\.0\.0\.1:99999: that is no address"):
        await serve.run(serve.ServeOptions(url="127.0.0.1:99999"))
