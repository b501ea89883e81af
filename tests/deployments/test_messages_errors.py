"""Errors of `/v1/messages`: in that API's form, wherever they come from, and in the names of its fields."""

from __future__ import annotations

import time
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from cluster.security_config import SecurityConfig
from cluster.stream_messages import Rejected
from deployments.api_keys import hash_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.messages_schema import parse_messages
from deployments.openai_api import create_app
from tests.deployments.socket_server import served
from tests.deployments.test_messages_api import BODY, PATH, TOOL, events_of
from tests.fakes.cell_stand_in import CellStandIn

KEY = "fk-0123456789abcdef0123456789abcdef"
TURNS = BODY["messages"]
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
NO_SCHEMA = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "thing"}}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": 5}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages.0.content.0.tool_use_id",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}
                        ],
                    }
                ]
            },
            "messages.0.content.0.content",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "c", "name": "now"}]}]},
            "messages.0.content.0",
        ),
        (
            {"messages": [*TURNS, {"role": "assistant", "content": [{"type": "text", "text": ""}, RESULT]}]},
            "messages.1.content.1",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "hm"}]}]},
            "messages.0.content.0",
        ),
        ({"system": 7}, "system"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "now"}]}, "tools.0.input_schema"),
        ({"tools": [{"type": "bash_20250124"}], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "get_weather"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (NO_SCHEMA, "output_config.format"),
        ({"speculation": {"trace": True}, "stream": True}, "speculation.trace"),
        ({"n": 2}, "n"),
        ({"input": "a"}, "input"),
        ({"model": "claude"}, "model"),
    ],
)
@pytest.mark.api("messages", "messages", "system", "max_tokens", "tools", "tool_choice", "model")
async def test_bad_requests_are_named(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await http.post(PATH, json=BODY | fields)
    assert response.status_code in (400, 404), response.text
    body = response.json()
    counted = await http.post(f"{PATH}/count_tokens", json=BODY | fields)
    if fields in ({"max_tokens": None}, NO_SCHEMA):  # nothing is generated
        assert counted.status_code == 200, counted.text
    else:
        assert counted.json()["error"] == body["error"]
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["x-request-id"]
    kind = "not_found_error" if response.status_code == 404 else "invalid_request_error"
    assert (body["error"]["type"], body["error"]["param"]) == (kind, param), body
    assert f"`{param.partition('.')[0]}" in body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_tokens": 99_999},
            "input length and `max_tokens` exceed context limit: 8 + 99999 > 2048, "
            "decrease input length or `max_tokens` and try again",
        ),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "prompt is too long: "),
    ],
)
async def test_a_window_that_is_exceeded_is_told_in_words_that_agents_know(
    http: httpx.AsyncClient, cell: CellStandIn, fields: dict[str, Any], message: str
) -> None:
    cell.max_tokens = 2048
    error = (await http.post(PATH, json=BODY | fields)).json()["error"]
    assert error["message"].startswith(message)
    assert error["code"] == "context_length_exceeded"


async def test_a_failure_in_the_middle_is_the_last_event(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    cell.finish_reason = "error"
    whole = await http.post(PATH, json=BODY)
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")
    events = events_of((await http.post(PATH, json=BODY | {"stream": True})).text)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "error")
    assert events[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in {event["type"] for event in events}


async def test_a_bug_is_told_in_the_same_form(
    http: httpx.AsyncClient, service: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(service, "begin", broken)
    response = await http.post(PATH, json=BODY)
    assert (response.status_code, response.json()["type"]) == (500, "error")
    assert response.json()["error"]["type"] == "api_error"
    chat = await http.post("/v1/chat/completions", json={"messages": BODY["messages"]})
    assert "type" not in chat.json()


async def test_an_overloaded_server_says_when_to_come_back(url: str, cell: CellStandIn) -> None:
    cell.reject = Rejected(request_id="", code="queue_full", message="full", retry_after_s=2.5)
    async with AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
        with pytest.raises(anthropic.RateLimitError) as refused:
            await client.messages.create(model="demo", **BODY)
    assert refused.value.response.headers["retry-after"] == "3"
    assert refused.value.body["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}"}, 200),
        # The other one may be meant for a gateway that was passed on the way.
        ({"authorization": f"Bearer {KEY}", "x-api-key": "another"}, 200),
        ({"authorization": "Bearer another", "x-api-key": KEY}, 401),
        ({"x-api-key": "another"}, 401),
        ({}, 401),
    ],
)
async def test_keys_come_in_either_header(service: ApiService, headers: dict[str, str], status: int) -> None:
    keys = SecurityConfig(key_hash=hash_key(KEY))
    app = create_app(service, authenticator=Authenticator(keys, environment={}))
    async with served(app) as url, httpx.AsyncClient() as client:
        for path, body in ((PATH, BODY), ("/v1/chat/completions", {"messages": BODY["messages"]})):
            response = await client.post(url + path, json=body, headers=headers)
            assert response.status_code == status, response.text
            if status == 401 and path == PATH:
                assert response.json()["error"]["type"] == "authentication_error"
        twice = [*headers.items(), ("x-api-key", KEY), ("x-api-key", KEY)]
        response = await client.post(url + PATH, json=BODY, headers=twice)
        assert response.status_code == (status if "authorization" in headers else 401)


def test_many_small_blocks_behind_a_large_one_are_soon_read() -> None:
    """Nothing else is answered meanwhile: where the text grew by each, a body of 4 MiB took ten seconds."""
    small: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a"}] * 4000}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "x" * 4_000_000}, *[small] * 20]
    began = time.process_time()
    chat = parse_messages({"max_tokens": 1, "messages": turns})
    assert time.process_time() - began < 5.0
    assert len(chat.messages) == 1
    assert chat.messages[0].content.endswith("x" + "\na" * 80_000)
