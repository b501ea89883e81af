"""`/v1/responses` with the official client, whole and streamed, over a stand-in cell."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from deployments.responses_schema import RESPONSES_NEUTRAL
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(autouse=True)
def roomy(cell: CellStandIn) -> None:
    cell.max_tokens = 2048


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as made:
        yield made


def says(cell: CellStandIn, text: str) -> None:
    cell.script = lambda submit: [*ids(text), *codec().eos_ids]


def prompt_of(cell: CellStandIn) -> str:
    return codec().decode(cell.submissions[-1].prompt, skip_special_tokens=False)


@pytest.mark.api("responses", "input", "instructions", "model", "metadata", "max_output_tokens")
async def test_text_in_text_out(client: AsyncOpenAI, cell: CellStandIn) -> None:
    response = await client.responses.create(
        model="demo", input="hello", instructions="be brief", metadata={"a": "b"}, max_output_tokens=60
    )
    assert response.status == "completed"
    assert response.output_text == ANSWER
    assert response.id.startswith("resp_")
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.output_tokens == len(ids(ANSWER)) + 1
    assert response.usage.input_tokens == len(cell.submissions[0].prompt)
    cached = response.usage.input_tokens_details
    assert (cached.cached_tokens, cached.cache_write_tokens) == (2, 0)  # as the stand-in's receipts say
    assert prompt_of(cell) == "<|bos|><|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"
    assert cell.submissions[0].sampling.max_tokens == 60


@pytest.mark.api("responses", "max_output_tokens", "input")
async def test_an_answer_that_is_cut_is_incomplete(client: AsyncOpenAI) -> None:
    items: Any = [
        {"role": "user", "content": "hello"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes?"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ]
    response = await client.responses.create(model="demo", input=items, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == codec().decode(ids(ANSWER)[:3])


@pytest.mark.api("responses", "stream", "stream_options")
async def test_events_of_a_text(client: AsyncOpenAI) -> None:
    stream = await client.responses.create(
        model="demo", input="hello", stream=True, stream_options={"include_obfuscation": False}
    )
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 3
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response  # type: ignore[union-attr]
    assert text == final.output_text == ANSWER
    assert final.usage is not None
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {final.output[0].id}


@pytest.mark.parametrize("per_step", [2, 100])
@pytest.mark.api("responses", "tools", "stream", "input")
async def test_calls_and_their_outputs(client: AsyncOpenAI, cell: CellStandIn, per_step: int) -> None:
    cell.per_step = per_step
    says(cell, f"Looking.{CALL}{CALL.replace('Oslo', 'Rome')}")
    request: Any = {"model": "demo", "input": [{"role": "user", "content": "Weather?"}], "tools": [TOOL]}
    whole = await client.responses.create(**request)
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert "Weather of a city." in prompt_of(cell)
    stream = await client.responses.create(**request, stream=True)
    events = [event async for event in stream]
    final: Response = events[-1].response
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    arguments = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(text) for text in arguments] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert [item.arguments for item in final.output if item.type == "function_call"] == arguments

    says(cell, "Rain.")
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in whole.output
        if item.type == "function_call"
    ]
    replay = [item.model_dump(exclude_none=True) for item in whole.output]
    request["input"] = [*request["input"], *replay, *outputs]
    assert (await client.responses.create(**request)).output_text == "Rain."
    assert prompt_of(cell).count("<tool_response>") == 2
    assert '"arguments": {"city": "Rome"}' in prompt_of(cell)


@pytest.mark.api("responses", "tool_choice", "parallel_tool_calls")
async def test_a_forced_call(client: AsyncOpenAI, cell: CellStandIn) -> None:
    says(cell, '{"city": "Oslo"}')
    response = await client.responses.create(
        model="demo",
        input="Weather?",
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "get_weather"},
        parallel_tool_calls=False,
    )
    (item,) = response.output
    assert item.type == "function_call"
    assert json.loads(item.arguments) == {"city": "Oslo"}
    assert response.parallel_tool_calls is False
    constraint = cell.submissions[0].sampling.constraint
    assert constraint is not None
    assert json.loads(constraint.text) == TOOL["parameters"]


@pytest.mark.api("responses", "tool_choice")
async def test_a_call_of_an_allowed_tool(client: AsyncOpenAI, cell: CellStandIn) -> None:
    says(cell, '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]')
    other = {"type": "function", "name": "other", "parameters": {"type": "object"}, "strict": False}
    tools: Any = [TOOL, other]
    response = await client.responses.create(
        model="demo",
        input="Weather?",
        tools=tools,
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    )
    (item,) = response.output
    assert item.type == "function_call"
    assert json.loads(item.arguments) == {"city": "Oslo"}
    assert "other" not in prompt_of(cell)
    constraint = cell.submissions[0].sampling.constraint
    assert constraint is not None
    assert "other" not in constraint.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "arguments"), [('[{"na', None), ('[{"name": "get_weather", "parameters": {"ci', '{"ci')]
)
@pytest.mark.api("responses", "tool_choice", "max_output_tokens")
async def test_a_forced_call_that_is_cut_off_is_no_message(
    http: httpx.AsyncClient, cell: CellStandIn, text: str, arguments: str | None, stream: bool
) -> None:
    cell.script = lambda submit: ids(text)
    body = {"input": "a", "tools": [TOOL], "tool_choice": "required", "top_logprobs": 0}
    body |= {"max_output_tokens": len(ids(text)), "stream": stream}
    response = await http.post(PATH, json=body)
    final = response.json() if not stream else json.loads(response.text.splitlines()[-2][6:])["response"]
    assert final["status"] == "incomplete"
    shown = [(item["type"], item["status"], item["arguments"]) for item in final["output"]]
    assert shown == ([] if arguments is None else [("function_call", "incomplete", arguments)])
    assert "output_text" not in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.api("responses", "top_logprobs")
async def test_log_probabilities(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"input": "hello", "top_logprobs": 2, "max_output_tokens": 4, "stream": stream}
    response = await http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    final = response.json() if not stream else json.loads(response.text.splitlines()[-2][6:])["response"]
    (part,) = final["output"][0]["content"]
    assert [entry["logprob"] for entry in part["logprobs"]] == [-0.25] * 4
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert "top_logprobs" in (await http.post(PATH, json=body | {"top_logprobs": 21})).text


@pytest.mark.api("responses", "top_logprobs", "stream")
async def test_deltas_have_the_log_probabilities_of_all_their_tokens(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    """Also where a character is of several tokens, all but the last of which show nothing."""
    cell.per_step = 1
    text = "caf\u00e9 \U0001f642 x"
    cell.script = lambda submit: [*ids(text), *codec().eos_ids]
    response = await http.post(PATH, json={"input": "hello", "top_logprobs": 0, "stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) < len(ids(text))
    told = [entry["token"] for event in deltas for entry in event["logprobs"]]
    assert told == [codec().token_text(token) for token in ids(text)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.api("responses", "include", "top_logprobs")
async def test_log_probabilities_are_included_by_name(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"input": "hello", "max_output_tokens": 4, "stream": stream}
    for fields, num_top in (
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, 3),
        ({"include": []}, None),
        ({"include": ["reasoning.encrypted_content"]}, None),  # agents always ask for it
    ):
        response = await http.post(PATH, json=body | fields)
        assert response.status_code == 200, response.text
        final = response.json() if not stream else json.loads(response.text.splitlines()[-2][6:])["response"]
        (part,) = final["output"][0]["content"]
        shown = [len(entry["top_logprobs"]) for entry in part["logprobs"]]
        assert shown == ([] if num_top is None else [num_top] * 4)
    error = (await http.post(PATH, json=body | {"include": ["file_search_call.names"]})).json()["error"]
    assert error["param"] == "include.0"
    assert "message.output_text.logprobs" in error["message"]


@pytest.mark.api(
    "responses", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
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
    response = await http.post(PATH, json={"input": "a", **fields, **service})
    assert response.status_code == 200, response.text
    (sent,) = cell.submissions
    expected = fields | {"logit_bias": {17: 3.0}, "allowed_token_ids": (17, 18), "stop_token_ids": (19,)}
    assert {name: getattr(sent.sampling, name) for name in fields} == expected
    assert (sent.priority, sent.tier, sent.objective.tpot_ms, sent.speculation.mode) == (-1, "fast", 7, "off")


@pytest.mark.api(
    "responses", "stop", "bad_words", "skip_special_tokens", "truncate_prompt_tokens", "truncation_side",
    "chat_template_kwargs", "request_id", "user", "safety_identifier", "prompt_cache_key", "session_id",
)  # fmt: skip
async def test_fields_of_texts(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    body = {"input": "hello", "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    response = await http.post(PATH, json=body | {"stop": " answers", "request_id": "r-1"})
    assert response.headers["x-request-id"] == "r-1"
    text = response.json()["output"][0]["content"][0]["text"]
    assert text == ANSWER.partition(" answers")[0]
    fields = {"bad_words": ["dog"], "truncate_prompt_tokens": 2, "truncation_side": "right", "session_id": ""}
    await http.post(PATH, json=body | fields)
    assert cell.submissions[-1].sampling.bad_words
    assert prompt_of(cell) == "<|bos|><|user|>"
    await http.post(PATH, json=body | {"chat_template_kwargs": {"bos_token": "!"}})
    assert prompt_of(cell).startswith("!<|user|>")
    cell.script = lambda submit: [*ids("a"), *codec().eos_ids, *ids("b")]
    response = await http.post(PATH, json=body | {"skip_special_tokens": False, "ignore_eos": True})
    assert response.json()["output"][0]["content"][0]["text"] == "a<|end|>b"


@pytest.mark.parametrize("name", sorted(RESPONSES_NEUTRAL))
@pytest.mark.api("responses", "*refused")
async def test_what_this_server_does_not_have(http: httpx.AsyncClient, name: str) -> None:
    for value in RESPONSES_NEUTRAL[name]:
        response = await http.post(PATH, json={"input": "a", name: value})
        assert response.status_code == 200, response.text
    response = await http.post(PATH, json={"input": "a", name: "resp_123"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert f"`{name}`" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"input": "word " * 3000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"name": "now"}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools.1.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["now"]}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": 3}}, "text.verbosity"),
        ({"truncation": "some"}, "truncation"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"model": "gpt-9"}, "model"),
    ],
)
@pytest.mark.api("responses", "input", "max_output_tokens", "tools", "tool_choice", "text", "model")
async def test_bad_requests_are_named(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await http.post(PATH, json={"input": "a", **fields})
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert f"`{param.partition('.')[0]}" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"max_output_tokens": 99_999},
            "max_output_tokens",
            "This model's maximum context length is 2048 tokens. However, `input` has 5 tokens and "
            "`max_output_tokens` asks for 99999 more",
        ),
        (
            {"input": [
                {"role": "user", "content": "a"},
                {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
                {"type": "function_call", "call_id": "d", "name": "now", "arguments": {}},
            ]},
            "input.2.arguments",
            "`input.2.arguments`: ",
        ),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role", "`input.0.role`: must be 'system'"),
        ({"input": [{"role": "user", "content": "a", "id": 1}]}, "input.0.id", "`input.0.id`: "),
        ({"input": [{"type": "function_call"}]}, "input.0.call_id", "The field `input.0.call_id` is"),
    ],
)  # fmt: skip
@pytest.mark.api("responses", "input", "max_output_tokens")
async def test_errors_speak_of_what_was_sent(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str
) -> None:
    error = (await http.post(PATH, json={"input": "a", **fields})).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(message)


async def test_a_failure_in_the_middle_is_an_event(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    cell.finish_reason = "error"
    assert (await http.post(PATH, json={"input": "a"})).status_code == 500
    response = await http.post(PATH, json={"input": "a", "stream": True})
    assert response.text.count("event: response.failed\n") == 1
    assert "response.completed" not in response.text


async def test_what_a_failure_cut_is_incomplete(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    """Whether the model was lost or the request ended by its id; calls before it are complete."""
    cell.finish_reason = "cancelled"
    for text, statuses in (("Looking.", ["incomplete"]), (f"{CALL}So.", ["completed", "incomplete"])):
        says(cell, text)
        response = await http.post(PATH, json={"input": "a", "stream": True, "tools": [TOOL]})
        failed = json.loads(response.text.splitlines()[-2][6:])
        assert failed["type"] == "response.failed"
        assert failed["response"]["status"] == "failed"
        assert [item["status"] for item in failed["response"]["output"]] == statuses
