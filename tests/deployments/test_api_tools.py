"""Tools in chats: what the model is told, and what its calls become, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from deployments.api_service import ApiService
from deployments.openai_api import create_app
from deployments.text_codec import TextCodec
from engine.grammar import Grammars, make_tokenizer
from engine.mask_bits import holds
from engine.matcher import Matcher
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids, tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Oslo?"}]
BODY: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def roomy(cell: CellStandIn) -> None:
    cell.max_tokens = 2048  # tools told in words are long


def says(cell: CellStandIn, text: str) -> None:
    cell.script = lambda submit: [*ids(text), *codec().eos_ids]


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as made:
        yield made


@pytest.mark.api("chat.completions", "tools", "tool_choice", "messages")
async def test_a_call_the_model_chose(client: AsyncOpenAI, cell: CellStandIn) -> None:
    says(cell, f"I will look.{CALL}")
    answer = await client.chat.completions.create(model="demo", tool_choice="auto", **BODY)  # type: ignore[call-overload]
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I will look."
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    prompt = codec().decode(cell.submissions[0].prompt, skip_special_tokens=False)
    assert "get_weather" in prompt
    assert "Weather of a city." in prompt
    assert cell.submissions[0].sampling.constraint is None

    says(cell, "It rains.")
    messages = [
        *MESSAGES,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    answer = await client.chat.completions.create(model="demo", messages=messages, tools=TOOLS)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].finish_reason == "stop"
    prompt = codec().decode(cell.submissions[1].prompt, skip_special_tokens=False)
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in prompt
    assert "rain" in prompt.partition("<tool_response>")[2]


@pytest.mark.parametrize("per_step", [1, 7])
@pytest.mark.api("chat.completions", "tools", "stream")
async def test_streamed_calls(client: AsyncOpenAI, cell: CellStandIn, per_step: int) -> None:
    cell.per_step = per_step
    says(cell, f"Two:{CALL}\n{CALL.replace('Oslo', 'Rome')}")
    stream = await client.chat.completions.create(model="demo", stream=True, **BODY)
    content, names, arguments, reasons = "", {}, {}, []
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or ():
                if delta.id:
                    names[delta.index] = delta.function.name
                arguments[delta.index] = arguments.get(delta.index, "") + (delta.function.arguments or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert content == "Two:"
    assert names == {0: "get_weather", 1: "get_weather"}
    assert [json.loads(text) for text in arguments.values()] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert reasons == ["tool_calls"]


@pytest.mark.api("chat.completions", "parallel_tool_calls")
async def test_at_most_one_call(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    says(cell, CALL * 2)
    body = (await http.post("/v1/chat/completions", json=BODY | {"parallel_tool_calls": False})).json()
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    forced = BODY | {"parallel_tool_calls": False, "tool_choice": "required"}
    await http.post("/v1/chat/completions", json=forced)
    constraint = cell.submissions[-1].sampling.constraint
    assert constraint is not None
    assert json.loads(constraint.text)["maxItems"] == 1


@pytest.mark.api("chat.completions", "tool_choice")
async def test_required_call_is_constrained(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    says(cell, '[{"name": "get_weather", "parameters": {"city": "Oslo"}}, {"name": "now", "parameters": {}}]')
    body = (await http.post("/v1/chat/completions", json=BODY | {"tool_choice": "required"})).json()
    message = body["choices"][0]["message"]
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "now"]
    constraint = cell.submissions[0].sampling.constraint
    assert constraint is not None
    schema = json.loads(constraint.text)
    assert [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]] == [
        "get_weather",
        "now",
    ]


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.api("chat.completions", "tool_choice")
async def test_of_allowed_tools_only_is_the_model_told(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    says(cell, CALL)
    for name, called in (("get_weather", True), ("now", False)):
        body = BODY | {"tool_choice": allowing("auto", name)}
        message = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert bool(message.get("tool_calls")) == called
        told = await http.post("/v1/chat/completions", json={"messages": MESSAGES, "tools": [
            tool for tool in TOOLS if tool["function"]["name"] == name]})  # fmt: skip
        assert told.status_code == 200
        assert cell.submissions[-2].prompt == cell.submissions[-1].prompt
        assert cell.submissions[-2].sampling.constraint is None
    says(cell, '[{"name": "now", "parameters": {}}]')
    body = BODY | {"tool_choice": allowing("required", "now")}
    message = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    constraint = cell.submissions[-1].sampling.constraint
    assert constraint is not None
    schema = json.loads(constraint.text)
    assert [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]] == ["now"]


@pytest.mark.parametrize("ids_of_schemas", [(), ("a", "b"), ("a", "a")])
@pytest.mark.api("chat.completions", "tools", "tool_choice")
async def test_schemas_of_required_calls_may_refer_to_their_own_definitions(
    http: httpx.AsyncClient, cell: CellStandIn, ids_of_schemas: tuple[str, ...]
) -> None:
    """As pydantic writes nested models; each tool has definitions of its own, under the same names."""
    definitions: list[dict[str, Any]] = [
        {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        {"enum": ["Oslo", "Rome"]},
    ]
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"look{number}",
                "parameters": {
                    "$defs": {"City": city},
                    "type": "object",
                    "properties": {"city": {"$ref": "#/$defs/City"}, "then": {"$ref": "#"}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
        for number, city in enumerate(definitions)
    ]
    for tool, name in zip(tools, ids_of_schemas, strict=False):
        tool["function"]["parameters"]["$id"] = name
    says(cell, '[{"name": "look1", "parameters": {"city": "Oslo"}}]')
    forced = BODY | {"tools": tools, "tool_choice": "required"}
    response = await http.post("/v1/chat/completions", json=forced)
    assert response.status_code == 200, response.text
    constraint = cell.submissions[0].sampling.constraint
    assert constraint is not None
    load = partial(make_tokenizer, codec().tokenizer_json(), sorted(codec().eos_ids), cell.vocab_size)
    grammars = Grammars(load)
    for text, is_call in (
        ('[{"name": "look1", "parameters": {"city": "Oslo", "then": {"city": "Rome"}}}]', True),
        ('[{"name": "look1", "parameters": {"city": {"name": "Oslo"}}}]', False),
        ('[{"name": "look0", "parameters": {"city": {"name": "Oslo"}}}]', True),
    ):
        matcher = Matcher(grammars, constraint)
        fits = True
        for token in ids(text):
            fits = fits and holds(matcher.allowed(), token)
            if fits:
                matcher.advance([token])
        assert fits == is_call, text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.api("chat.completions", "tool_choice", "stream")
async def test_named_call_is_constrained(http: httpx.AsyncClient, cell: CellStandIn, stream: bool) -> None:
    says(cell, '{"city": "Oslo"}')
    choice = {"type": "function", "function": {"name": "get_weather"}}
    response = await http.post("/v1/chat/completions", json=BODY | {"tool_choice": choice, "stream": stream})
    constraint = cell.submissions[0].sampling.constraint
    assert constraint is not None
    assert json.loads(constraint.text) == TOOLS[0]["function"]["parameters"]
    if stream:
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        assert choices[0]["delta"] == {"role": "assistant", "content": None}
        assert not any("content" in one["delta"] for one in choices[1:])
        deltas = [delta for one in choices for delta in one["delta"].get("tool_calls", ())]
        assert len(deltas) > 2
        assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"city": "Oslo"}'
        assert [delta["function"].get("name") for delta in deltas][:2] == ["get_weather", None]
    else:
        choices = [response.json()["choices"][0]]
        (call,) = choices[0]["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        assert choices[0]["message"]["content"] is None
    assert choices[-1]["finish_reason"] == "stop"


FORCED = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("choice", "text", "arguments"),
    [
        ("required", '[{"na', None),
        ("required", '[{"name": "get_wea', None),
        ("required", '[{"name": "get_weather", "para', ""),
        ("required", '[{"name": "get_weather", "parameters": {"city": "Os', '{"city": "Os'),
        ("required", FORCED[:-2], '{"city": "Oslo"}'),
        (NAMED, "", None),
        (NAMED, '{"city": "Os', '{"city": "Os'),
    ],
)
@pytest.mark.api("chat.completions", "tool_choice", "max_tokens", "stream")
async def test_a_forced_call_that_is_cut_off_is_no_text(
    http: httpx.AsyncClient, cell: CellStandIn, choice: Any, text: str, arguments: str | None
) -> None:
    cell.script = lambda submit: ids(text) or [1]  # a token without text
    body = BODY | {"tool_choice": choice, "max_tokens": len(ids(text)) or 1}
    whole = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    assert whole["message"]["content"] is None
    response = await http.post("/v1/chat/completions", json=body | {"stream": True})
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert choices[-1]["finish_reason"] == "length"
    assert not any(one["delta"].get("content") for one in choices)
    deltas = [delta for one in choices for delta in one["delta"].get("tool_calls", ())]
    if arguments is None:
        assert "tool_calls" not in whole["message"]
        assert deltas == []
    else:
        (call,) = whole["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": arguments}
        assert "".join(delta["function"]["arguments"] for delta in deltas) == arguments
        assert [delta["function"]["name"] for delta in deltas if "id" in delta] == ["get_weather"]


@pytest.mark.api("chat.completions", "tool_choice")
async def test_no_call_where_none_is_wanted(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    says(cell, CALL)
    body = (await http.post("/v1/chat/completions", json=BODY | {"tool_choice": "none"})).json()
    assert body["choices"][0]["message"]["content"] == CALL
    assert "get_weather" not in codec().decode(cell.submissions[0].prompt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": TOOLS + TOOLS}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": allowing("auto", "now", "other")}, "tool_choice.allowed_tools"),
        ({"tool_choice": allowing("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowing("never", "now")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [], "tool_choice": allowing("auto", "now")}, "tool_choice.allowed_tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0.tool_call_id"),
        (
            {"messages": [{"role": "user", "content": "", "tool_calls": [
                {"id": "1", "function": {"name": "now", "arguments": "{}"}}]}]},
            "messages.0.tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [
                {"id": "1", "function": {"name": "now", "arguments": {}}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)  # fmt: skip
@pytest.mark.api("chat.completions", "tools", "tool_choice", "messages")
async def test_bad_tools_are_named(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await http.post("/v1/chat/completions", json=BODY | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert f"`{param.partition('.')[0]}" in error["message"]


@pytest.mark.api("chat.completions", "tools")
async def test_tools_are_refused_where_no_parser_is_known(cell: CellStandIn) -> None:
    service = ApiService(cell, codec(), give_up_after_s=0.5)
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        response = await http.post("/v1/chat/completions", json=BODY)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert "target.tool_parser" in response.json()["error"]["message"]
    await service.close()


@pytest.mark.api("chat.completions", "tools")
@pytest.mark.parametrize("stream", [False, True])
async def test_odd_calls_fail_no_request(http: httpx.AsyncClient, cell: CellStandIn, stream: bool) -> None:
    for call, called in (
        ('{"name": ["get_weather"], "arguments": {}}', False),
        (r'{"name": "get_weather", "arguments": {"city": "\ud83d"}}', True),
    ):
        says(cell, f"<tool_call>{call}</tool_call>")
        response = await http.post("/v1/chat/completions", json=BODY | {"stream": stream})
        assert response.status_code == 200, response.text
        assert not stream or response.text.endswith("data: [DONE]\n\n")
        assert ('"tool_calls":[' in response.text) == called


async def test_a_template_that_knows_tools_is_given_them(cell: CellStandIn) -> None:
    knowing: Any = tokenizer().__class__(
        tokenizer_object=tokenizer().backend_tokenizer, eos_token="<|end|>", bos_token="<|bos|>"
    )
    knowing.chat_template = (
        "{% for tool in tools %}{{ tool.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}{% endfor %}|{% endfor %}"
    )
    service = ApiService(cell, TextCodec(knowing), give_up_after_s=0.5)
    assert service.tool_parser == "hermes"
    transport = httpx.ASGITransport(app=create_app(service))
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        response = await http.post("/v1/chat/completions", json=BODY | {"messages": messages})
        assert response.status_code == 200, response.text
        # As an earlier answer may have had it: half of a surrogate pair.
        messages[1]["tool_calls"][0]["function"]["arguments"] = r'{"city": "O\ud83d"}'
        response = await http.post("/v1/chat/completions", json=BODY | {"messages": messages})
        assert response.status_code == 200, response.text
    await service.close()
    form = "get_weather;now;user:Weather in Oslo?|assistant:<tool_call>{}|tool:rain|"
    for submission, city in zip(cell.submissions, ("Oslo", "O\ufffd"), strict=True):
        assert codec().decode(submission.prompt, skip_special_tokens=False) == form.format(city)


@pytest.mark.api("chat.completions", "messages")
async def test_a_call_without_arguments_may_have_no_text_of_them(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    for arguments in ("", "{}"):
        call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        messages = [*MESSAGES, called, {"role": "tool", "tool_call_id": "c", "content": "noon"}]
        response = await http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS})
        assert response.status_code == 200, response.text
    assert cell.submissions[0].prompt == cell.submissions[1].prompt
