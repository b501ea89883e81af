"""Requests with a key over HTTP: retries attach, continue where they stopped, and generate nothing twice."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.idempotency_config import IdempotencyConfig
from cluster.security_config import SecurityConfig
from deployments.api_keys import hash_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.front_end_metrics import FrontEndMetrics
from deployments.openai_api import create_app
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import ANSWER

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODY = {"prompt": "hi", "max_tokens": 100}
BODIES = {
    COMPLETIONS: BODY,
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
    RESPONSES: {"input": "hi", "max_output_tokens": 100},
}
KEY = {"Idempotency-Key": "one"}
STREAM = BODY | {"stream": True}


def app_of(
    service: ApiService, metrics: FrontEndMetrics | None = None, **settings: object
) -> httpx.AsyncClient:
    """A client of an app with these settings of idempotency."""
    app = create_app(service, metrics=metrics, idempotency=IdempotencyConfig.model_validate(settings))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://cell")


def text_of(stream: str) -> str:
    """What the chunks of a completion say."""
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_same_bytes_and_generates_nothing(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, stream: bool
) -> None:
    body = BODIES[path] | {"stream": stream}
    first = await http.post(path, json=body, headers=KEY)
    again = await http.post(path, json=dict(reversed(body.items())), headers=KEY)
    assert first.status_code == again.status_code == 200
    assert again.content == first.content
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.headers["X-Request-Id"] != first.headers["X-Request-Id"]
    assert len(cell.submissions) == 1
    assert (await http.post(path, json=body, headers={"Idempotency-Key": "two"})).status_code == 200
    assert len(cell.submissions) == 2


async def test_a_retry_attaches_to_a_running_answer(url: str, cell: CellStandIn) -> None:
    cell.pause_s = 0.02

    async def ask(client: httpx.AsyncClient, body: dict[str, object]) -> httpx.Response:
        return await client.post(url + COMPLETIONS, json=body, headers=KEY)

    async with httpx.AsyncClient(timeout=20) as client:
        for body in (STREAM, BODY | {"request_id": "r"}):
            key = KEY if body is STREAM else {}
            first = asyncio.create_task(client.post(url + COMPLETIONS, json=body, headers=key))
            before = len(cell.submissions)
            await eventually(partial(_has_more, cell, before))
            again = await client.post(url + COMPLETIONS, json=body, headers=key)
            assert not cell.cancels
            assert again.headers["Idempotent-Replayed"] == "true"
            assert again.content == (await first).content
    assert len(cell.submissions) == 2


async def test_a_stream_continues_after_the_last_event(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    whole = (await http.post(COMPLETIONS, json=STREAM, headers=KEY)).content
    events = [event + b"\n\n" for event in whole.split(b"\n\n") if event]
    assert [event.split(b"\n")[0] for event in events] == [b"id: %d" % n for n in range(len(events))]
    assert text_of(whole.decode()) == ANSWER
    for last in range(len(events)):
        rest = await http.post(COMPLETIONS, json=STREAM, headers=KEY | {"Last-Event-ID": str(last)})
        assert rest.content == b"".join(events[last + 1 :])
    assert len(cell.submissions) == 1
    for wrong in (str(len(events)), "-1", "x"):
        refused = await http.post(COMPLETIONS, json=STREAM, headers=KEY | {"Last-Event-ID": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_who_continues_an_answer_without_its_key_is_refused(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    """Else who has the first half of one answer would be sent all of another."""
    refused = await http.post(COMPLETIONS, json=STREAM, headers={"Last-Event-ID": "3"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "Last-Event-ID")
    assert "`Idempotency-Key`" in error["message"]
    assert not cell.submissions
    named = STREAM | {"request_id": "mine"}
    assert (await http.post(COMPLETIONS, json=named, headers={"Last-Event-ID": "0"})).status_code == 200


async def test_another_run_of_a_request_has_the_same_events_at_the_same_positions(
    service: ApiService, cell: CellStandIn
) -> None:
    """A front end that knows nothing of the first run continues where that one broke off."""
    body = BODIES[CHAT] | {
        "stream": True,
        "n": 2,
        "logprobs": True,
        "stream_options": {"include_usage": True},
    }

    def told(stream: bytes) -> list[object]:
        events = [event for event in stream.decode().split("\n\n") if event]
        kept: list[object] = []
        for event in events:
            chunk = json.loads(event.split("data: ", 1)[1]) if "{" in event else {}
            kept.append((event.split("\n")[0], chunk.get("choices"), chunk.get("usage")))
        return kept

    runs = []
    for per_step in (1, 3, 7):
        cell.per_step = per_step
        async with app_of(service) as fresh:
            runs.append((await fresh.post(CHAT, json=body, headers=KEY)).content)
        async with app_of(service) as fresh:
            rest = await fresh.post(CHAT, json=body, headers=KEY | {"Last-Event-ID": "4"})
            assert told(rest.content) == told(runs[0])[5:]
    assert told(runs[0]) == told(runs[1]) == told(runs[2])
    assert len({submit.sampling.seed for submit in cell.submissions}) == 2  # one per choice, in all runs


async def test_the_seed_follows_from_the_key_unless_there_is_one(
    service: ApiService, cell: CellStandIn
) -> None:
    for headers, body in (
        (KEY, BODY),
        (KEY, BODY),
        ({"Idempotency-Key": "two"}, BODY),
        (KEY, BODY | {"seed": 7}),
    ):
        async with app_of(service) as fresh:
            assert (await fresh.post(COMPLETIONS, json=body, headers=headers)).status_code == 200
    seeds = [submit.sampling.seed for submit in cell.submissions]
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[3] == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_is_for_one_request(http: httpx.AsyncClient, cell: CellStandIn, stream: bool) -> None:
    body = BODY | {"stream": stream}
    assert (await http.post(COMPLETIONS, json=body, headers=KEY)).status_code == 200
    other = await http.post(COMPLETIONS, json=body | {"max_tokens": 9}, headers=KEY)
    assert other.status_code == 422
    assert other.json()["error"]["param"] == "Idempotency-Key"
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    assert (await http.post(CHAT, json=BODIES[CHAT], headers=KEY)).status_code == 422
    named = await http.post(COMPLETIONS, json=body | {"request_id": "mine"})
    assert named.status_code == 200
    clash = await http.post(COMPLETIONS, json=body | {"request_id": "mine", "max_tokens": 9})
    assert (clash.status_code, clash.json()["error"]["param"]) == (422, "request_id")
    assert len(cell.submissions) == 2


async def test_what_is_no_key(service: ApiService, cell: CellStandIn) -> None:
    async with (
        app_of(service) as http,
        app_of(service, x_request_id=True) as traced,
        app_of(service, enabled=False) as off,
    ):
        for client, number in ((http, 2), (traced, 3), (off, 5)):
            for _ in range(2):
                await client.post(
                    COMPLETIONS, json=BODY, headers={"X-Request-Id": "abc"} | (KEY if client is off else {})
                )
            assert len(cell.submissions) == number
        for bad in ("", "x" * 256, "a\tb"):
            refused = await http.post(COMPLETIONS, json=BODY, headers={"Idempotency-Key": bad})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")
        twice = [("Idempotency-Key", "a"), ("Idempotency-Key", "b"), ("Content-Type", "application/json")]
        refused = await http.post(COMPLETIONS, json=BODY, headers=twice)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")
        trace = await http.post(COMPLETIONS, json=STREAM | {"speculation": {"trace": True}}, headers=KEY)
        assert (trace.status_code, trace.json()["error"]["code"]) == (400, "unsupported_parameter")


async def test_a_failed_request_is_tried_anew(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    refused = await http.post(COMPLETIONS, json=BODY | {"temperature": 3}, headers=KEY)
    assert refused.status_code == 400
    for body in (BODY, STREAM):
        key = {"Idempotency-Key": f"stream {body is STREAM}"}
        cell.finish_reason = "error"
        assert "failed on this request" in (await http.post(COMPLETIONS, json=body, headers=key)).text
        cell.finish_reason = None
        again = await http.post(COMPLETIONS, json=body, headers=key)
        assert again.status_code == 200
        assert "error" not in again.text
        assert "Idempotent-Replayed" not in again.headers


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
async def test_a_failed_stream_continues_with_the_event_that_did_not_come(
    http: httpx.AsyncClient, cell: CellStandIn, path: str
) -> None:
    """What told the failure had the id of that event: who went on after it never got it."""
    body = BODIES[path] | {"stream": True}
    whole = _ids((await http.post(path, json=body, headers={"Idempotency-Key": "two"})).text)
    cell.finish_reason = "error"
    *before, failure, _ = (await http.post(path, json=body, headers=KEY)).text.split("\n\n")
    assert "failed" in failure
    cell.finish_reason = None
    last = _ids("\n\n".join([*before, failure]))[-1]  # as browsers keep it
    rest = await http.post(path, json=body, headers=KEY | {"Last-Event-ID": last})
    assert _ids("\n\n".join(before)) + _ids(rest.text) == whole


def _ids(stream: str) -> list[str]:
    return re.findall("^id: (.*)", stream, re.MULTILINE)


async def test_nobody_gets_the_answer_of_another_api_key(
    service: ApiService, cell: CellStandIn, tmp_path: Path
) -> None:
    keys = [{"name": name, "hash": hash_key(f"a-long-secret-of-{name}")} for name in ("ann", "bob")]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    authenticator = Authenticator(SecurityConfig(keys_file=tmp_path / "keys.yaml"), environment={})
    app = create_app(service, authenticator=authenticator)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        for number, name in enumerate(("ann", "bob"), start=1):
            headers = KEY | {"Authorization": f"Bearer a-long-secret-of-{name}"}
            for _ in range(2):
                assert (await http.post(COMPLETIONS, json=BODY, headers=headers)).status_code == 200
                assert len(cell.submissions) == number
    assert cell.submissions[0].sampling.seed != cell.submissions[1].sampling.seed


class Vanishing:
    """A client that leaves in the middle of a stream."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self.url, self.headers = url, headers

    async def leaves_after(self, num_events: int) -> str:
        """Reads so many events; what they were."""
        read = ""
        async with (
            httpx.AsyncClient(timeout=20) as client,
            client.stream("POST", self.url + COMPLETIONS, json=STREAM, headers=self.headers) as response,
        ):
            async for line in response.aiter_lines():
                read += line + "\n"
                if read.count("data: ") >= num_events and not line:
                    break
        return read


async def test_who_vanishes_comes_back(url: str, cell: CellStandIn) -> None:
    cell.pause_s = 0.03
    read = await Vanishing(url, KEY).leaves_after(3)
    last = [line[4:] for line in read.splitlines() if line.startswith("id: ")][-1]
    await asyncio.sleep(0.1)
    assert not cell.cancels
    async with httpx.AsyncClient(timeout=20) as client:
        rest = await client.post(url + COMPLETIONS, json=STREAM, headers=KEY | {"Last-Event-ID": last})
    assert text_of(read + rest.text) == ANSWER
    assert rest.text.endswith("data: [DONE]\n\n")
    assert len(cell.submissions) == 1
    # Without a key nobody could come back.
    await Vanishing(url, {}).leaves_after(2)
    await eventually(lambda: len(cell.cancels) == 1)


async def test_who_does_not_come_back_is_given_up_and_still_uses_its_limits(
    service: ApiService, cell: CellStandIn
) -> None:
    cell.starved = True
    metrics = FrontEndMetrics()
    authenticator = Authenticator(environment={}, max_open=1)
    config = IdempotencyConfig(grace_s=0.15)
    app = create_app(service, metrics=metrics, idempotency=config, authenticator=authenticator)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as client:
        asking = asyncio.create_task(client.post(COMPLETIONS, json=STREAM, headers=KEY))
        await eventually(lambda: len(cell.submissions) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 429
        await eventually(lambda: len(cell.cancels) == 1)
        cell.starved = False
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 200
    assert 'dropped_total{front_end="",reason="abandoned"} 1.0' in metrics.render()


async def test_what_is_kept_is_bounded(service: ApiService, cell: CellStandIn) -> None:
    metrics = FrontEndMetrics()
    async with app_of(service, metrics, max_answers=2, ttl_s=1) as http:

        async def ask(key: str) -> httpx.Response:
            return await http.post(COMPLETIONS, json=BODY, headers={"Idempotency-Key": key})

        for key in ("a", "b", "c"):
            assert "Idempotent-Replayed" not in (await ask(key)).headers
        assert "Idempotent-Replayed" in (await ask("c")).headers
        assert "Idempotent-Replayed" not in (await ask("a")).headers  # the oldest had gone
        await asyncio.sleep(1.1)
        assert "Idempotent-Replayed" not in (await ask("a")).headers
        cell.starved = True
        asking = [asyncio.create_task(ask(key)) for key in "xy"]
        await eventually(lambda: len(cell.submissions) == 7)
        refused = await ask("z")
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    text = metrics.render()
    for outcome, number in (("new", 7), ("replayed", 1), ("refused", 1)):
        assert f'requests_total{{front_end="",outcome="{outcome}"}} {number}.0' in text
    assert 'reason="memory"} 3.0' in text
    assert 'reason="ttl"}' in text


def _has_more(cell: CellStandIn, than: int) -> bool:
    return len(cell.submissions) > than
