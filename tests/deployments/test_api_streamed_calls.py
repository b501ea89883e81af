"""Calls in streams of chats and responses: told while they are written, and in the end as in the whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from deployments.api_service import ApiService
from deployments.openai_api import create_app
from deployments.tool_parsers import FORMS
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids

PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "integer"}},
}
FILE = {"path": "a.py", "content": 'def f():\n    return "é"\n' * 4, "mode": 420}
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Write it."}]
CHAT_TOOL = {"type": "function", "function": {"name": "write_file", "parameters": PARAMETERS}}
CHAT: dict[str, Any] = {"messages": MESSAGES, "tools": [CHAT_TOOL]}
RESPONSE: dict[str, Any] = {
    "input": "Write it.",
    "tools": [{"type": "function", "name": "write_file", "parameters": PARAMETERS}],
}
ARGUMENTS = json.dumps(FILE, ensure_ascii=False, indent=1)
BODY = f'{{"name": "write_file", "arguments": {ARGUMENTS}}}'
#: Of kinds whose arguments are no JSON.
PUT_TOGETHER = ("gemma4", "glm", "minimax_m2", "olmo3", "pythonic", "qwen3_coder", "seed_oss")
#: Of kinds that write them between marks.
AS_JSON = (
    *("cohere", "deepseek_v3", "functionary_v3", "gigachat3", "granite", "hunyuan_a13b"),
    *("kimi_k2", "nemotron", "phi4_mini"),
)
CALLS = {
    **{kind: FORMS[kind].written("write_file", FILE) for kind in PUT_TOGETHER},
    **{kind: FORMS[kind].written("write_file", ARGUMENTS) for kind in AS_JSON},
    "hermes": f"<tool_call>\n{BODY}\n</tool_call>",
    "json": BODY.replace('"arguments"', '"parameters"', 1),
    "mistral": f"[TOOL_CALLS]write_file{ARGUMENTS}",
}
KINDS = sorted(CALLS)


@pytest.fixture(autouse=True)
def slow_and_roomy(cell: CellStandIn) -> None:
    cell.max_tokens, cell.per_step = 4096, 1


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def says(cell: CellStandIn, text: str) -> None:
    cell.script = lambda submit: [*ids(text), *codec().eos_ids]


@pytest.mark.parametrize("tool_parser", KINDS)
@pytest.mark.api("chat.completions", "tools", "stream")
async def test_a_chat_s_call_is_told_while_it_is_written(
    client: AsyncOpenAI, cell: CellStandIn, tool_parser: str
) -> None:
    says(cell, CALLS[tool_parser])
    whole = await client.chat.completions.create(model="demo", **CHAT)
    ((expected,),) = [choice.message.tool_calls for choice in whole.choices]
    assert json.loads(expected.function.arguments) == FILE
    assert tool_parser in PUT_TOGETHER or expected.function.arguments == ARGUMENTS
    stream = await client.chat.completions.create(model="demo", stream=True, **CHAT)
    deltas, reasons = [], []
    async for chunk in stream:
        for choice in chunk.choices:
            assert not choice.delta.content
            deltas += choice.delta.tool_calls or []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    first, *others = deltas
    assert (first.index, first.type, first.function.name) == (0, "function", "write_file")
    assert first.id
    assert len(first.function.arguments) <= 2  # the bracket, and what was in the same token
    assert {(one.index, one.id, one.function.name) for one in others} == {(0, None, None)}
    assert max(len(one.function.arguments) for one in others) < 20
    assert "".join(one.function.arguments for one in deltas) == expected.function.arguments
    assert reasons == ["tool_calls"] == [whole.choices[0].finish_reason]


@pytest.mark.parametrize("tool_parser", KINDS)
@pytest.mark.api("responses", "tools", "stream")
async def test_a_response_s_call_is_told_while_it_is_written(
    client: AsyncOpenAI, cell: CellStandIn, tool_parser: str
) -> None:
    says(cell, CALLS[tool_parser])
    (expected,) = (await client.responses.create(model="demo", **RESPONSE)).output
    assert json.loads(expected.arguments) == FILE
    stream = await client.responses.create(model="demo", stream=True, **RESPONSE)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    num_deltas = kinds.count("response.function_call_arguments.delta")
    assert num_deltas > 30
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * num_deltas,
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[2].item.name == "write_file"
    assert events[2].item.arguments == ""
    assert "".join(event.delta for event in events[3:-3]) == expected.arguments
    assert [events[-3].arguments, events[-2].item.arguments] == [expected.arguments] * 2
    assert events[-1].response.output[0].arguments == expected.arguments


@pytest.mark.parametrize("per_step", [1, 4, 1000])
@pytest.mark.api("responses", "tools", "stream")
async def test_text_between_calls_stays_between_them(
    http: httpx.AsyncClient, cell: CellStandIn, per_step: int
) -> None:
    says(cell, f"One:{CALLS['hermes']}\nTwo:{CALLS['hermes']} done")
    cell.per_step = per_step
    expected = ["One:", ARGUMENTS, "Two:", ARGUMENTS, "done"]
    for stream in (False, True):
        response = await http.post("/v1/responses", json=RESPONSE | {"stream": stream, "top_logprobs": 0})
        final = response.json() if not stream else json.loads(response.text.splitlines()[-2][6:])["response"]
        shown = [item.get("arguments") or item["content"][0]["text"] for item in final["output"]]
        assert shown == expected
        told = [
            entry for item in final["output"] for entry in item.get("content", [{}])[0].get("logprobs", ())
        ]
        assert 0 < len(told) <= len(cell.script(cell.submissions[-1]))  # none of them twice


async def test_log_probabilities_are_of_the_text_and_not_of_the_form_of_calls(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    call = '<tool_call>{"name": "write_file", "arguments": {}}</tool_call>'

    def told(item: dict[str, Any]) -> str | None:
        if item["type"] != "message":
            return None
        return b"".join(bytes(entry["bytes"]) for entry in item["content"][0]["logprobs"]).decode()

    for text, expected in (
        (f"One <a>:{call}\nTwo\u00e9 <b{call}", ["One <a>:", None, "Two\u00e9 <b", None]),
        (call, [None]),
        (f"{call}x", [None, "x<|end|>"]),
    ):
        says(cell, text)
        for per_step, stream in itertools.product((1, 2, 5, 1000), (False, True)):
            cell.per_step = per_step
            response = await http.post("/v1/responses", json=RESPONSE | {"stream": stream, "top_logprobs": 0})
            *_, last = [line for line in response.text.split("\n") if line]
            final = json.loads(last[6:])["response"] if stream else response.json()
            assert list(map(told, final["output"])) == expected


@pytest.mark.api("chat.completions", "tools", "max_tokens", "stream")
async def test_a_call_that_is_cut_off_or_no_json_stays_one(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    """It may have been told already; the finish reason and the arguments say what happened."""
    cut = '<tool_call>{"name": "write_file", "arguments": {"content": "def f'
    for text, arguments, reason in (
        (cut, '{"content": "def f', "length"),
        (f'{cut}"() }}</tool_call>', '{"content": "def f"() }', "tool_calls"),
        (cut.partition(' {"content')[0], None, "length"),
    ):
        says(cell, text)
        body = CHAT | ({"max_tokens": len(ids(text))} if reason == "length" else {})
        message = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert message["finish_reason"] == reason
        response = await http.post("/v1/chat/completions", json=body | {"stream": True})
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        assert choices[-1]["finish_reason"] == reason
        deltas = [delta for one in choices for delta in one["delta"].get("tool_calls", ())]
        content = "".join(one["delta"].get("content") or "" for one in choices)
        assert content == (message["message"]["content"] or "") == (text if arguments is None else "")
        told = [call["function"]["arguments"] for call in message["message"].get("tool_calls", ())]
        assert told == ([] if arguments is None else [arguments])
        assert "".join(delta["function"]["arguments"] for delta in deltas) == (arguments or "")


@pytest.mark.api("responses", "tools", "max_output_tokens")
async def test_a_response_s_call_that_is_cut_off_is_incomplete(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    says(cell, CALLS["hermes"])
    for stream in (False, True):
        body = RESPONSE | {"max_output_tokens": 60, "stream": stream}
        response = await http.post("/v1/responses", json=body)
        final = response.json() if not stream else json.loads(response.text.splitlines()[-2][6:])["response"]
        (item,) = final["output"]
        assert (item["type"], item["status"]) == ("function_call", "incomplete")
        assert ARGUMENTS.startswith(item["arguments"])


@pytest.mark.parametrize(
    ("tool_parser", "told"), [("glm", "<tool_call>NAME\n<arg_key>KEY"), ("qwen3_coder", "<function=NAME>")]
)
@pytest.mark.api("chat.completions", "tools", "messages")
async def test_a_model_without_a_place_for_tools_is_shown_calls_as_it_is_to_write_them(
    service: ApiService, cell: CellStandIn, tool_parser: str, told: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "write_file", "arguments": ARGUMENTS}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        response = await http.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    assert response.status_code == 200, response.text
    prompt = codec().decode(cell.submissions[0].prompt, skip_special_tokens=False)
    assert CALLS[tool_parser] in prompt
    assert told in prompt.partition("<|user|>")[0]


@pytest.mark.parametrize("tool_parser", KINDS)
@pytest.mark.api("chat.completions", "tool_choice", "stream")
async def test_required_calls_are_told_while_they_are_written(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    says(cell, f"[{CALLS['json']}, {CALLS['json']}]")
    body = CHAT | {"tool_choice": "required", "stream": True}
    response = await http.post("/v1/chat/completions", json=body)
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [one for line in lines for one in json.loads(line)["choices"][0]["delta"].get("tool_calls", ())]
    for index in (0, 1):
        told = [delta["function"]["arguments"] for delta in deltas if delta["index"] == index]
        assert len(told) > 30
        assert "".join(told) == ARGUMENTS
