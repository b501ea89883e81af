"""`/v1/messages` with Anthropic's own client, whole and streamed, over a stand-in cell."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from deployments.messages_schema import MESSAGES_NEUTRAL
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

PATH = "/v1/messages"
BODY: dict[str, Any] = {"max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(autouse=True)
def roomy(cell: CellStandIn) -> None:
    cell.max_tokens = 2048


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as made:
        yield made


def says(cell: CellStandIn, text: str) -> None:
    cell.script = lambda submit: [*ids(text), *codec().eos_ids]


def prompt_of(cell: CellStandIn) -> str:
    return codec().decode(cell.submissions[-1].prompt, skip_special_tokens=False)


def events_of(text: str) -> list[dict[str, Any]]:
    """Events of a stream, each under the name that it has in itself."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


@pytest.mark.api("messages", "messages", "max_tokens", "model", "system", "metadata")
async def test_text_in_text_out(client: AsyncAnthropic, cell: CellStandIn) -> None:
    message = await client.messages.create(
        model="demo",
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f3;"},
            {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=60,
        metadata={"user_id": None},
    )
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": ANSWER}
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    cached = message.usage.cache_read_input_tokens
    assert cached == 2  # of the stand-in's receipts
    assert message.usage.input_tokens + cached == len(cell.submissions[0].prompt)
    assert message.usage.output_tokens == len(ids(ANSWER)) + 1
    assert prompt_of(cell) == "<|bos|><|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"
    assert cell.submissions[0].sampling.max_tokens == 60


@pytest.mark.api("messages", "stream")
async def test_events_of_a_text(client: AsyncAnthropic, http: httpx.AsyncClient) -> None:
    events = events_of((await http.post(PATH, json=BODY | {"stream": True})).text)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 3
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    usage = events[-2]["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert events[0]["message"]["usage"]["input_tokens"] == prompt
    assert events[-2]["metrics"]["e2e_ms"] > 0
    async with client.messages.stream(
        model="demo", max_tokens=64, messages=[{"role": "user", "content": "hello"}]
    ) as stream:
        assert "".join([text async for text in stream.text_stream]) == ANSWER
        final = await stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", len(ids(ANSWER)) + 1)


@pytest.mark.api("messages", "stop_sequences", "stop", "max_tokens")
async def test_why_it_ended(client: AsyncAnthropic, http: httpx.AsyncClient) -> None:
    asked: Any = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
    cut = await client.messages.create(**asked, max_tokens=3)
    assert cut.stop_reason == "max_tokens"
    stopped = await client.messages.create(**asked, max_tokens=64, stop_sequences=["zzz", " answers"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " answers")
    assert stopped.content[0].to_dict() == {"type": "text", "text": ANSWER.partition(" answers")[0]}
    same = (await http.post(PATH, json=BODY | {"stop": " answers"})).json()
    assert same["stop_sequence"] == " answers"
    error = (await http.post(PATH, json=BODY | {"stop": "a", "stop_sequences": ["b"]})).json()["error"]
    assert error["param"] == "stop"


@pytest.mark.api("messages", "messages")
async def test_the_answer_goes_on_with_the_assistants_last_words(
    client: AsyncAnthropic, cell: CellStandIn
) -> None:
    says(cell, " Sol")
    message = await client.messages.create(
        model="demo",
        max_tokens=9,
        messages=[
            {"role": "user", "content": "The sun?"},
            {"role": "user", "content": "In Latin."},
            {"role": "assistant", "content": [{"type": "text", "text": "It is"}]},
        ],
    )
    assert message.content[0].to_dict() == {"type": "text", "text": " Sol"}
    # Turns of one role that follow one another are one.
    assert prompt_of(cell) == "<|bos|><|user|>The sun?\nIn Latin.<|end|><|assistant|>It is"


@pytest.mark.parametrize("per_step", [2, 100])
@pytest.mark.api("messages", "tools", "messages", "stream", "thinking")
async def test_calls_and_their_results(client: AsyncAnthropic, cell: CellStandIn, per_step: int) -> None:
    cell.per_step = per_step
    says(cell, f"Looking.{CALL}{CALL.replace('Oslo', 'Rome')}")
    request: Any = {
        "model": "demo",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Weather?"}],
        # What Anthropic's servers would run is none of this model's business.
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = await client.messages.create(**request)
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use"
    assert "Weather of a city." in prompt_of(cell)
    assert "web_search" not in prompt_of(cell)
    async with client.messages.stream(**request) as stream:
        final = await stream.get_final_message()
    assert final.stop_reason == "tool_use"
    calls = [block for block in final.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == [
        ("get_weather", {"city": "Oslo"}),
        ("get_weather", {"city": "Rome"}),
    ]
    assert [b.input for b in whole.content if b.type == "tool_use"] == [call.input for call in calls]

    says(cell, "Rain.")
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "rain"},
        {"type": "tool_result", "tool_use_id": calls[1].id, "is_error": True},
        {"type": "text", "text": "So?"},
    ]
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    request["messages"] += [
        {"role": "assistant", "content": [thought, *whole.content]},
        {"role": "user", "content": results},
    ]
    answer = await client.messages.create(**request)
    assert answer.content[0].to_dict() == {"type": "text", "text": "Rain."}
    told = prompt_of(cell).partition("Looking.")[2]
    assert '"arguments": {"city": "Rome"}' in told
    assert "<tool_response>\nrain\n</tool_response>" in told
    assert "<tool_response>\nerror\n</tool_response>" in told
    assert told.endswith("So?<|end|><|assistant|>")
    assert "hm" not in told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.api("messages", "tools")
async def test_arguments_that_are_no_object_come_back_as_they_were_written(
    http: httpx.AsyncClient, cell: CellStandIn, stream: bool
) -> None:
    """A call that the limit cut is told as text in a stream, and wrapped where an object must stand."""
    text = '{"city": "Os'
    cell.script = lambda submit: ids(text)
    body = BODY | {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
    response = await http.post(PATH, json=body | {"max_tokens": len(ids(text)), "stream": stream})
    if stream:
        deltas = [
            event["delta"] for event in events_of(response.text) if "index" in event and "delta" in event
        ]
        assert "".join(delta["partial_json"] for delta in deltas) == text
        return
    (call,) = response.json()["content"]
    assert call["input"] == {"INVALID_JSON": text}
    assert response.json()["stop_reason"] == "max_tokens"
    turns = [
        *BODY["messages"],
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "no"}]},
    ]
    await http.post(PATH, json=BODY | {"messages": turns, "tools": [TOOL]})
    assert f'"arguments": {text}' in prompt_of(cell)


@pytest.mark.parametrize(
    "text",
    [
        r'{"city": "cut \ud83d"}',  # half of a surrogate pair
        '{"city": 1e999, "size": -1e999}',
        '{"size": 0.1000000000000000055511151231257827, "city": "a", "city": "b"}',
        '{"city":\n\t123456789012345678901234567890}',
        "{}",
    ],
)
@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.api("messages", "tools", "stream")
async def test_arguments_are_those_of_the_stream_to_the_character(
    http: httpx.AsyncClient, cell: CellStandIn, text: str, is_forced: bool
) -> None:
    """Also where reading and writing them anew would fail, or make them others."""
    says(cell, text if is_forced else CALL.replace('{"city": "Oslo"}', text))
    choice = {"type": "tool", "name": "get_weather"} if is_forced else {"type": "auto"}
    body = BODY | {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    whole = await http.post(PATH, json=body)
    assert whole.status_code == 200, whole.text
    assert f'"input":{text}' in whole.text
    assert whole.json()["stop_reason"] == "tool_use"
    events = events_of((await http.post(PATH, json=body | {"stream": True})).text)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == text


@pytest.mark.parametrize(
    ("choice", "text", "most"),
    [
        ({"type": "tool", "name": "get_weather"}, '{"city": "Oslo"}', None),
        ({"type": "any"}, '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]', None),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]',
            1,
        ),
    ],
)
@pytest.mark.api("messages", "tool_choice")
async def test_forced_calls(
    http: httpx.AsyncClient, cell: CellStandIn, choice: dict[str, Any], text: str, most: int | None
) -> None:
    says(cell, text)
    shown = (await http.post(PATH, json=BODY | {"tools": [TOOL], "tool_choice": choice})).json()
    assert [(block["name"], block["input"]) for block in shown["content"]] == [
        ("get_weather", {"city": "Oslo"})
    ]
    assert shown["stop_reason"] == "tool_use"
    constraint = cell.submissions[0].sampling.constraint
    assert constraint is not None
    assert json.loads(constraint.text).get("maxItems") == most


@pytest.mark.api("messages", "tool_choice")
async def test_no_calls_where_none_are_wanted(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    says(cell, CALL)
    shown = (await http.post(PATH, json=BODY | {"tools": [TOOL], "tool_choice": {"type": "none"}})).json()
    assert [block["type"] for block in shown["content"]] == ["text"]
    assert "get_weather" not in prompt_of(cell)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
@pytest.mark.api("messages", "output_config", "output_format")
async def test_a_schema_for_the_answer(http: httpx.AsyncClient, cell: CellStandIn, field: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted: dict[str, Any] = {"type": "json_schema", "schema": schema}
    wanted = wanted if field == "output_format" else {"effort": "low", "format": wanted}
    assert (await http.post(PATH, json=BODY | {field: wanted})).status_code == 200
    constraint = cell.submissions[0].sampling.constraint
    assert constraint is not None
    assert json.loads(constraint.text) == schema
    both = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    both |= {"output_format": {"type": "json_schema", "schema": schema}}
    assert (await http.post(PATH, json=BODY | both)).json()["error"]["param"] == "output_format"


async def test_an_answer_without_text_is_a_block_without_text(
    client: AsyncAnthropic, cell: CellStandIn
) -> None:
    says(cell, "")
    message = await client.messages.create(model="demo", **BODY)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": ""}]


async def test_tokens_are_counted(client: AsyncAnthropic, cell: CellStandIn) -> None:
    asked: Any = {"model": "demo", "messages": BODY["messages"], "tools": [TOOL], "system": "be brief"}
    counted = await client.messages.count_tokens(**asked)
    assert not cell.submissions
    await client.messages.create(**asked, max_tokens=9)
    assert counted.input_tokens == len(cell.submissions[0].prompt)
    assert counted.input_tokens > len(ids("be brief"))
    long = "word " * 3000  # more than the window holds
    counted = await client.messages.count_tokens(model="demo", messages=[{"role": "user", "content": long}])
    assert counted.input_tokens > 3000
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(**asked | {"model": "claude"})


async def test_a_retry_gets_the_same_events(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    body = BODY | {"stream": True, "temperature": 1.0}
    headers = {"Idempotency-Key": "k-1"}
    first = await http.post(PATH, json=body, headers=headers)
    again = await http.post(PATH, json=body, headers=headers)
    assert "message_stop" in first.text
    assert again.text == first.text
    assert again.headers["idempotent-replayed"] == "true"
    assert len(cell.submissions) == 1


@pytest.mark.api(
    "messages", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "allowed_token_ids", "stop_token_ids", "min_tokens",
    "ignore_eos", "priority", "service_tier", "slo", "speculation",
)  # fmt: skip
async def test_fields_of_sampling_and_service_reach_the_cell(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "seed": 5, "min_tokens": 2,
        "logit_bias": {"17": 3}, "allowed_token_ids": [17, 18], "stop_token_ids": [19],
    }  # fmt: skip
    service = {
        "ignore_eos": True,
        "priority": -1,
        "service_tier": "fast",
        "slo": {"tpot_ms": 7},
        "speculation": {"mode": "off"},
    }
    response = await http.post(PATH, json=BODY | fields | service)
    assert response.status_code == 200, response.text
    (sent,) = cell.submissions
    expected = fields | {"logit_bias": {17: 3.0}, "allowed_token_ids": (17, 18), "stop_token_ids": (19,)}
    assert {name: getattr(sent.sampling, name) for name in fields} == expected
    assert (sent.priority, sent.tier, sent.objective.tpot_ms, sent.speculation.mode) == (-1, "fast", 7, "off")
    response = await http.post(PATH, json=BODY | {"service_tier": "standard_only"})
    assert response.json()["metrics"]["tier"]["served"] == "default"


@pytest.mark.api(
    "messages", "bad_words", "skip_special_tokens", "truncate_prompt_tokens", "truncation_side",
    "chat_template_kwargs", "request_id", "user", "safety_identifier", "prompt_cache_key", "store",
    "cache_control", "context_management", "diagnostics", "speed", "session_id",
)  # fmt: skip
async def test_fields_of_texts(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    body = BODY | {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "store": False}
    body |= {"cache_control": {"type": "ephemeral"}, "context_management": {"edits": []}}
    body |= {"diagnostics": {"previous_message_id": "msg_1"}, "speed": "standard", "session_id": "i"}
    response = await http.post(PATH, json=body | {"request_id": "r-1"})
    assert response.headers["x-request-id"] == "r-1"
    await http.post(PATH, json=body | {"bad_words": ["dog"], "truncate_prompt_tokens": 2})
    assert cell.submissions[-1].sampling.bad_words
    assert len(cell.submissions[-1].prompt) == 2
    await http.post(PATH, json=body | {"truncate_prompt_tokens": 2, "truncation_side": "right"})
    assert prompt_of(cell) == "<|bos|><|user|>"
    await http.post(PATH, json=body | {"chat_template_kwargs": {"bos_token": "!"}})
    assert prompt_of(cell).startswith("!<|user|>")
    (eos,) = codec().eos_ids
    cell.script = lambda submit: [*ids("a"), eos, *ids("b")]
    response = await http.post(PATH, json=body | {"skip_special_tokens": False, "ignore_eos": True})
    assert response.json()["content"][0]["text"] == "a<|end|>b"


@pytest.mark.parametrize("name", sorted(MESSAGES_NEUTRAL))
@pytest.mark.api("messages", "*refused")
async def test_what_this_server_does_not_have(http: httpx.AsyncClient, name: str) -> None:
    for value in MESSAGES_NEUTRAL[name]:
        assert (await http.post(PATH, json=BODY | {name: value})).status_code == 200
    response = await http.post(PATH, json=BODY | {name: "c_123"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
