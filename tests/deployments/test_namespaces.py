"""Functions in namespaces, which is how Codex tells of servers of the Model Context Protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
NAMESPACE = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [TOOL]}
CALLS = (
    '<tool_call>{"name": "mcp__files__look", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
)


@pytest.fixture(autouse=True)
def roomy(cell: CellStandIn) -> None:
    cell.max_tokens = 4096


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as made:
        yield made


def says(cell: CellStandIn, text: str) -> None:
    cell.script = lambda submit: [*ids(text), *codec().eos_ids]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.api("responses", "tools", "input", "stream")
async def test_calls_name_the_namespace(client: AsyncOpenAI, cell: CellStandIn, stream: bool) -> None:
    says(cell, CALLS)
    request: Any = {"model": "demo", "input": [{"role": "user", "content": "a"}], "tools": [TOOL, NAMESPACE]}
    if stream:
        events = [event async for event in await client.responses.create(**request, stream=True)]
        response = events[-1].response
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [(item.name, item.namespace) for item in added] == [("look", "mcp__files"), ("look", None)]
        done = [e.name for e in events if e.type == "response.function_call_arguments.done"]
        assert done == ["look", "look"]
    else:
        response = await client.responses.create(**request)
    calls = [(item.name, item.namespace) for item in response.output]
    assert calls == [("look", "mcp__files"), ("look", None)]
    assert [tool.type for tool in response.tools] == ["function", "namespace"]

    says(cell, "So.")
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "b"} for item in response.output
    ]
    request["input"] += [*(item.model_dump() for item in response.output), *outputs]
    assert (await client.responses.create(**request)).output_text == "So."
    prompt = codec().decode(cell.submissions[-1].prompt)
    assert prompt.count("mcp__files__look") == 2  # the function, and its call


@pytest.mark.api("responses", "tools", "tool_choice")
async def test_calls_may_be_forced(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    says(cell, '[{"name": "mcp__files__look", "parameters": {}}]')
    for choice in ("required", {"type": "function", "name": "mcp__files__look"}):
        body = {"input": "a", "tools": [NAMESPACE], "tool_choice": choice}
        response = await http.post(PATH, json=body)
        assert response.status_code == 200, response.text
        (item,) = response.json()["output"]
        assert (item["name"], item["namespace"]) == ("look", "mcp__files")
        says(cell, "{}")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([NAMESPACE | {"name": None}], "tools.0.name"),
        ([TOOL, NAMESPACE | {"tools": None}], "tools.1.tools"),
        ([NAMESPACE | {"tools": [TOOL, TOOL | {"name": "?"}]}], "tools.0.tools.1.name"),
        ([NAMESPACE, NAMESPACE], "tools"),
        ([NAMESPACE, TOOL | {"name": "mcp__files__look"}], "tools"),
        ([NAMESPACE | {"name": "n" * 123}], "tools"),
    ],
)
@pytest.mark.api("responses", "tools")
async def test_what_is_wrong_is_named(http: httpx.AsyncClient, tools: list[Any], param: str) -> None:
    response = await http.post(PATH, json={"input": "a", "tools": tools})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.api("responses", "tools")
async def test_names_may_be_as_long_as_those_of_functions(http: httpx.AsyncClient) -> None:
    longest = NAMESPACE | {"name": "n" * 122}
    assert (await http.post(PATH, json={"input": "a", "tools": [longest]})).status_code == 200
