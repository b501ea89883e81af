"""Null is the same as leaving a field out: the official clients' own, and those nobody knows yet."""

from __future__ import annotations

from typing import Any, get_type_hints

import httpx
import pytest
from anthropic.types import message_create_params
from openai import AsyncOpenAI, pydantic_function_tool
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionAssistantMessageParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import (
    EasyInputMessageParam,
    ResponseFunctionToolCallParam,
    response_create_params,
)
from openai.types.responses.response_input_param import FunctionCallOutput
from pydantic import BaseModel

from tests.deployments.bad_requests import BASES
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PARAMETERS = [
    (path, name)
    for path, params in (
        (COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
        (CHAT, chat_params.CompletionCreateParamsBase),
        (RESPONSES, response_create_params.ResponseCreateParamsBase),
        (MESSAGES, message_create_params.MessageCreateParamsBase),
    )
    for name in sorted({*get_type_hints(params), "stream"} - {"prompt", "messages", "input"})
    # Of Anthropic's, one must be there, and these are headers.
    if (path, name) not in {(MESSAGES, one) for one in ("max_tokens", "user_profile_id", "workspace_id")}
]


@pytest.mark.parametrize(("path", "name"), PARAMETERS)
async def test_every_parameter_of_the_official_client(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, name: str
) -> None:
    base = {key: value for key, value in (BASES[path] | {"seed": 5}).items() if key != name}
    response = await http.post(path, json=base | {name: None})
    assert response.status_code == 200, response.text
    await http.post(path, json=base)
    with_null, without = cell.submissions
    if name != "seed":
        assert with_null.sampling == without.sampling


@pytest.mark.parametrize(("path", "name"), PARAMETERS)
async def test_no_parameter_of_the_official_client_is_unknown(
    http: httpx.AsyncClient, path: str, name: str
) -> None:
    """What is not supported is said to be that."""
    response = await http.post(path, json=BASES[path] | {name: {"asks": ["something"]}})
    if response.status_code != 200:
        error = response.json()["error"]
        assert (error["param"], error["code"]) != (name, "unknown_parameter"), response.text


def with_nulls(params: Any, given: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(get_type_hints(params)) | given


async def test_every_field_of_the_official_clients_messages(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    cell.max_tokens = 2048
    hello = {"role": "user", "content": "hello", "name": None, "colour": None}
    said = with_nulls(ChatCompletionAssistantMessageParam, {"role": "assistant", "content": "a"})
    called = with_nulls(ChatCompletionAssistantMessageParam, {"role": "assistant", "tool_calls": [CALL]})
    result = {"role": "tool", "content": "b", "tool_call_id": "c"}
    response = await http.post(CHAT, json={"messages": [hello, said, hello, called, result]})
    assert response.status_code == 200, response.text
    items = [
        with_nulls(EasyInputMessageParam, hello),
        with_nulls(
            ResponseFunctionToolCallParam,
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        ),
        with_nulls(FunctionCallOutput, {"type": "function_call_output", "call_id": "c", "output": "b"}),
    ]
    text = {"format": {"type": "text", "name": None, "schema": None}, "verbosity": None}
    response = await http.post(RESPONSES, json={"input": items, "text": text})
    assert response.status_code == 200, response.text


async def test_answers_sent_back_as_they_are(url: str, cell: CellStandIn) -> None:
    """The client's types have more fields than the answer: `phase`, `annotations` ..."""
    cell.max_tokens = 2048
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        chat = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hello"}]
        )
        messages: Any = [{"role": "user", "content": "hello"}, chat.choices[0].message.model_dump()]
        again: Any = {"role": "user", "content": "again"}
        await client.chat.completions.create(model="demo", messages=[*messages, again])
        response = await client.responses.create(model="demo", input="hello")
        items: Any = [item.model_dump() for item in response.output]
        assert items[0]["phase"] is None
        await client.responses.create(model="demo", input=[*items, again])


@pytest.fixture
def roomy(cell: CellStandIn) -> None:
    cell.max_tokens = 2048  # tools told in words are long


class City(BaseModel):
    name: str


# Pydantic's, of how the client writes its own generic types.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
async def test_answers_that_the_official_client_parsed_are_sent_back(
    roomy: None, url: str, cell: CellStandIn
) -> None:
    """Its helpers add what they read, `parsed` and `parsed_arguments`, and send that with the message."""
    hello: Any = {"role": "user", "content": "hello"}
    tools = [pydantic_function_tool(City)]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        chat = client.chat.completions
        cell.script = lambda submit: [*ids('{"name": "Oslo"}'), *codec().eos_ids]
        said = (await chat.parse(model="demo", messages=[hello], response_format=City)).choices[0].message
        assert said.parsed == City(name="Oslo")
        turn: Any = [hello, said, hello]
        await chat.create(model="demo", messages=turn)

        call = '<tool_call>{"name": "City", "arguments": {"name": "Oslo"}}</tool_call>'
        cell.script = lambda submit: [*ids(call), *codec().eos_ids]
        whole = await chat.parse(model="demo", messages=[hello], tools=tools)
        async with chat.stream(model="demo", messages=[hello], tools=tools) as stream:
            streamed = await stream.get_final_completion()
        for called in (whole.choices[0].message, streamed.choices[0].message):
            assert called.tool_calls is not None
            assert called.tool_calls[0].function.parsed_arguments == City(name="Oslo")
            result = {"role": "tool", "content": "b", "tool_call_id": called.tool_calls[0].id}
            turn = [hello, called, result]
            await chat.create(model="demo", messages=turn)
    assert cell.submissions[4].prompt == cell.submissions[5].prompt


async def test_what_is_not_null_is_still_unknown(http: httpx.AsyncClient) -> None:
    for path, base in BASES.items():
        assert (await http.post(path, json=base | {"colour": None})).status_code == 200
        error = (await http.post(path, json=base | {"colour": "red"})).json()["error"]
        assert (error["param"], error["code"]) == ("colour", "unknown_parameter")
    body = {"messages": [{"role": "user", "content": "a"}], "slo": {"tpot": 5}}
    assert (await http.post(CHAT, json=body)).json()["error"]["param"] == "slo.tpot"


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
@pytest.mark.api("chat.completions", "messages")
async def test_messages_to_the_model_have_content(http: httpx.AsyncClient, role: str) -> None:
    """OpenAI refuses them as well; an empty message is the text "", and a null is an oversight."""
    message: dict[str, Any] = {"role": role, "content": None}
    last = {"role": "user", "content": "a"}
    error = (await http.post(CHAT, json={"messages": [message, last]})).json()["error"]
    assert (error["param"], error["code"]) == ("messages.0.content", "missing_required_parameter")


@pytest.mark.api("chat.completions", "messages")
async def test_messages_of_the_model_need_none(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    """It may have called something, or said nothing."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    last = {"role": "user", "content": "a"}
    called = [message | {"tool_calls": [CALL]}, {"role": "tool", "content": "b", "tool_call_id": "c"}]
    for turn in ([last, *called], [last, message, last], [last, {**message, "content": ""}, last]):
        response = await http.post(CHAT, json={"messages": turn})
        assert response.status_code == 200, response.text
    assert cell.submissions[1].prompt == cell.submissions[2].prompt
