"""A format beside tools over the API: what the model may answer, and what clients are told of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from deployments.errors import ApiError
from deployments.openai_schema import ChatRequest
from deployments.structured_outputs import ConstraintCheck
from deployments.tools import Tool, ToolUse
from engine.constraint import Constraint
from tests.deployments.test_formats_beside_tools import (
    ANSWERS,
    AS_JSON,
    FORMAT,
    NEITHER,
    WEATHER,
    hermes,
    may_be,
    weather,
)
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids

FUNCTION = {"name": "get_weather", "parameters": WEATHER}
MESSAGES = [{"role": "user", "content": "Weather in Oslo?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": FORMAT}},
    },
    "/v1/responses": {
        "input": "Weather in Oslo?",
        "tools": [{"type": "function", "strict": None, **FUNCTION}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": FORMAT}},
    },
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 400,
        "tools": [{"name": "get_weather", "input_schema": WEATHER}],
        "output_config": {"format": {"type": "json_schema", "schema": FORMAT}},
    },
}


@pytest.fixture(autouse=True)
def roomy(cell: CellStandIn) -> None:
    cell.max_tokens = 2048  # tools told in words are long


def says(cell: CellStandIn, text: str) -> None:
    cell.script = lambda submit: [*ids(text), *codec().eos_ids]


def told(path: str, body: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls of a whole answer."""
    if path == "/v1/chat/completions":
        message = body["choices"][0]["message"]
        calls = [one["function"] for one in message.get("tool_calls") or []]
        return message["content"] or "", [(one["name"], json.loads(one["arguments"])) for one in calls]
    if path == "/v1/responses":
        items = body["output"]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        calls = [item for item in items if item["type"] == "function_call"]
        return "".join(texts), [(one["name"], json.loads(one["arguments"])) for one in calls]
    blocks = body["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return "".join(texts), [
        (block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"
    ]


def streamed(path: str, text: str) -> tuple[str, str, str]:
    """Text, names and arguments of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    said, names, arguments = "", "", ""
    for event in events:
        if path == "/v1/chat/completions":
            for choice in event["choices"]:
                said += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or []:
                    names += call["function"].get("name") or ""
                    arguments += call["function"]["arguments"]
        elif event["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
            said += event["delta"] if "text" in event["type"] else ""
            arguments += event["delta"] if "arguments" in event["type"] else ""
        elif event["type"] == "response.output_item.added":
            names += event["item"].get("name") or ""
        elif event["type"] == "content_block_start":
            names += event["content_block"].get("name") or ""
        elif event["type"] == "content_block_delta":
            said += event["delta"].get("text") or ""
            arguments += event["delta"].get("partial_json") or ""
    return said, names, arguments


@pytest.mark.api("chat.completions", "response_format", "tools", "tool_choice")
@pytest.mark.api("responses", "text", "tools", "tool_choice")
@pytest.mark.api("messages", "output_config", "tools")
@pytest.mark.parametrize("path", BODIES)
async def test_the_model_may_call_or_answer(http: httpx.AsyncClient, cell: CellStandIn, path: str) -> None:
    call, answer = hermes(weather("arguments")), ANSWERS[0]
    for text, expected in ((call, ("", [("get_weather", {"city": "Oslo"})])), (answer, (answer, []))):
        says(cell, text)
        response = await http.post(path, json=BODIES[path])
        assert response.status_code == 200, response.text
        assert told(path, response.json()) == expected
        constraint = cell.submissions[-1].sampling.constraint
        assert constraint is not None
        assert all(may_be(constraint, one, codec()) for one in (call, answer))
        assert not any(may_be(constraint, one, codec()) for one in NEITHER)
        stream = await http.post(path, json=BODIES[path] | {"stream": True})
        said, names, arguments = streamed(path, stream.text)
        assert (said, names) == (expected[0], "get_weather" if expected[1] else "")
        assert json.loads(arguments or "null") == (expected[1][0][1] if expected[1] else None)


@pytest.mark.api("chat.completions", "response_format", "tool_choice", "parallel_tool_calls")
async def test_one_call_at_most_where_that_is_asked_for(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    path = "/v1/chat/completions"
    two = hermes(weather("arguments")) + "\n" + hermes(weather("arguments"))
    for parallel in (True, False):
        response = await http.post(path, json=BODIES[path] | {"parallel_tool_calls": parallel})
        assert response.status_code == 200
        constraint = cell.submissions[-1].sampling.constraint
        assert constraint is not None
        assert may_be(constraint, two, codec()) is parallel


@pytest.mark.api("chat.completions", "response_format", "tool_choice")
@pytest.mark.api("responses", "text", "tool_choice")
@pytest.mark.api("messages", "output_config", "tool_choice")
@pytest.mark.parametrize("path", BODIES)
async def test_beside_a_forced_call_a_format_says_nothing(
    http: httpx.AsyncClient, cell: CellStandIn, path: str
) -> None:
    forced: list[Any] = [{"type": "any"}, {"type": "tool", "name": "get_weather"}]
    if path == "/v1/chat/completions":
        forced = ["required", {"type": "function", "function": {"name": "get_weather"}}]
    elif path == "/v1/responses":
        forced = ["required", {"type": "function", "name": "get_weather"}]
    written = (f"[{weather('parameters')}]", '{"city": "Oslo"}')
    for choice, text in zip(forced, written, strict=True):
        says(cell, text)
        without = {name: value for name, value in BODIES[path].items() if name not in _FORMATS}
        answers = [
            await http.post(path, json=body | {"tool_choice": choice}) for body in (BODIES[path], without)
        ]
        for answer in answers:
            assert answer.status_code == 200, answer.text
            assert told(path, answer.json()) == ("", [("get_weather", {"city": "Oslo"})])
        first, second = (one.sampling.constraint for one in cell.submissions[-2:])
        assert first == second is not None


_FORMATS = ("response_format", "text", "output_config")


async def test_without_a_call_a_format_is_the_whole_answer_s(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    path = "/v1/chat/completions"
    await http.post(path, json=BODIES[path] | {"tool_choice": "none"})
    assert cell.submissions[-1].sampling.constraint == AS_JSON


@pytest.mark.api("chat.completions", "response_format", "tools")
async def test_any_object_is_one_beside_tools(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    path = "/v1/chat/completions"
    await http.post(path, json=BODIES[path] | {"response_format": {"type": "json_object"}})
    constraint = cell.submissions[-1].sampling.constraint
    assert constraint is not None
    assert may_be(constraint, '{"any": [1, 2]}', codec())
    assert may_be(constraint, hermes(weather("arguments")), codec())
    assert not may_be(constraint, "[1]", codec())


@pytest.mark.api("chat.completions", "response_format", "tools")
async def test_a_tool_whose_schema_cannot_be_followed_stays_one(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    """Without a format its arguments, as the model chose to call it, are not held to it, either."""
    path = "/v1/chat/completions"
    other = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "not": {}}}}
    response = await http.post(path, json=BODIES[path] | {"tools": [*BODIES[path]["tools"], other]})
    assert response.status_code == 200, response.text
    constraint = cell.submissions[-1].sampling.constraint
    assert constraint is not None
    assert may_be(constraint, hermes('{"name": "odd", "arguments": {"x": 1}}'), codec())
    assert may_be(constraint, ANSWERS[0], codec())
    assert not may_be(constraint, NEITHER[0], codec())


@pytest.mark.parametrize(("num_tools", "size"), [(40, 3000), (1, 70_000), (1, 65_450)])
async def test_so_do_those_whose_schemas_are_too_long(num_tools: int, size: int) -> None:
    check = ConstraintCheck(codec())
    functions = [
        {"name": f"f{number}", "parameters": {"description": f"{number}" * size}}
        for number in range(num_tools)
    ]
    tools = [Tool.model_validate({"type": "function", "function": function}) for function in functions]
    request = ChatRequest.model_validate({"messages": MESSAGES, "response_format": {"type": "json_object"}})
    constraint = await check.resolve(request, ToolUse(tools, "auto", "hermes"), 512)
    assert constraint is not None
    assert may_be(constraint, hermes('{"name": "f0", "arguments": {"x": 1}}'), codec())
    assert not may_be(constraint, hermes('{"name": "f40", "arguments": {}}'), codec(), ends=False)


async def test_schemas_that_are_nested_too_deeply_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    use = ToolUse(None, "auto", "hermes")
    use.tools, use._schemas = [{}], {"f": deep}
    request = ChatRequest.model_validate({"messages": MESSAGES, "response_format": {"type": "json_object"}})
    with pytest.raises(ApiError, match="nested"):
        await ConstraintCheck(codec()).resolve(request, use, 512)


@pytest.mark.parametrize("parser", ["hermes", "json", "mistral", "glm"])
@pytest.mark.api("chat.completions", "response_format", "tools")
async def test_tools_that_no_grammar_can_be_made_of_are_called_with_any_arguments(
    parser: str,
) -> None:
    """Beside a format they were a 500, where without one they are taken."""
    deep: dict[str, Any] = {}
    for _ in range(190):
        deep = {"a": deep}
    for schema in ({"default": deep}, {"type": "object", "properties": {"a": {"const": 10**4299}}}):
        tools = [Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})]
        asked = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
        use = ToolUse(tools, "auto", parser)
        constraint = await ConstraintCheck(codec()).resolve(ChatRequest.model_validate(asked), use, 512)
        assert constraint is not None
        assert may_be(constraint, "{}", codec())


@pytest.mark.api("chat.completions", "response_format", "tools")
async def test_a_format_that_cannot_be_followed_is_the_one_at_fault(http: httpx.AsyncClient) -> None:
    path = "/v1/chat/completions"
    wrong = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
    response = await http.post(path, json=BODIES[path] | {"response_format": wrong})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format.json_schema"


@pytest.mark.api("chat.completions", "structured_outputs", "guided_choice", "tool_choice")
async def test_vllm_s_own_fields_are_of_the_whole_output(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    """As there: whoever writes a grammar of calls and text themselves has it as it is."""
    path = "/v1/chat/completions"
    body = {name: value for name, value in BODIES[path].items() if name not in _FORMATS}
    await http.post(path, json=body | {"guided_choice": ["yes", "no"]})
    assert cell.submissions[-1].sampling.constraint == Constraint(kind="choice", text='["yes", "no"]')
    refused = await http.post(path, json=body | {"guided_choice": ["yes", "no"], "tool_choice": "required"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "guided_choice"
