"""Schemas of tools that must be called: what constrains nothing rules none out; refused ones are named."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from deployments.openai_schema import ChatRequest, validated
from deployments.tools import ToolUse
from tests.fakes.cell_stand_in import CellStandIn

MESSAGES = [{"role": "user", "content": "hello"}]
NAMED = {"type": "function", "function": {"name": "odd"}}
PLAIN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
#: As zod, pydantic and generators from OpenAPI write them, and what is held to of them.
IDLE: dict[str, tuple[Any, Any]] = {
    "record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
        {"type": "object", "additionalProperties": {"type": "string"}},
    ),
    "list": ({"type": "array", "uniqueItems": False}, {"type": "array"}),
    "file": ({"type": "string", "format": "path"}, {"type": "string"}),
    "number": ({"type": "integer", "format": "int64"}, {"type": "integer"}),
    "day": ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
    "format": ({"enum": ["path", "uri-template"]}, {"enum": ["path", "uri-template"]}),
}


def with_odd(schema: dict[str, Any], choice: Any) -> dict[str, dict[str, Any]]:
    """Requests of all APIs with two tools, one of which takes that."""
    names = {"plain": PLAIN, "odd": schema}
    functions = [{"name": name, "parameters": one} for name, one in names.items()]
    is_named = choice is NAMED
    return {
        "/v1/chat/completions": {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": choice,
        },
        "/v1/responses": {
            "input": "hello",
            "tools": [{"type": "function"} | function for function in functions],
            "tool_choice": {"type": "function", "name": "odd"} if is_named else choice,
        },
        "/v1/messages": {
            "messages": MESSAGES,
            "max_tokens": 8,
            "tools": [{"name": name, "input_schema": one} for name, one in names.items()],
            "tool_choice": {"type": "tool", "name": "odd"} if is_named else {"type": "any"},
        },
    }


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.api("chat.completions", "tools", "tool_choice")
@pytest.mark.api("responses", "tools", "tool_choice")
@pytest.mark.api("messages", "tools", "tool_choice")
async def test_what_constrains_nothing_is_left_out(
    http: httpx.AsyncClient, cell: CellStandIn, choice: Any
) -> None:
    cell.max_tokens = 4096
    given = {"type": "object", "properties": {name: schema for name, (schema, _) in IDLE.items()}}
    held_to = {"type": "object", "properties": {name: left for name, (_, left) in IDLE.items()}}
    for path, body in with_odd(given, choice).items():
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        constraint = cell.submissions[-1].sampling.constraint
        assert constraint is not None
        schema = json.loads(constraint.text)
        if choice == "required":
            schema = schema["items"]["anyOf"][1]["properties"]["parameters"]
            schema.pop("$id")
        assert schema == held_to


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "integer", "minimum": -(2**63)}, "2^53"),
    ],
)
@pytest.mark.api("chat.completions", "tools", "tool_choice")
@pytest.mark.api("responses", "tools", "tool_choice")
@pytest.mark.api("messages", "tools", "tool_choice")
async def test_the_function_is_named_whose_schema_is_refused(
    http: httpx.AsyncClient, cell: CellStandIn, choice: Any, schema: dict[str, Any], says: str
) -> None:
    odd = {"type": "object", "properties": {"a": schema}}
    for path, body in with_odd(odd, choice).items():
        response = await http.post(path, json=body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("tools", "invalid_constraint")
        assert error["message"].startswith("`tools` cannot be used: the schema of the function 'odd': ")
        assert says in error["message"]
    assert not cell.submissions


def test_schemas_that_are_refused_for_their_length_are_not_looked_through() -> None:
    """Nothing else is answered meanwhile: it took seconds of one of a few megabytes."""
    for size, is_looked_through in ((10, True), (50_000, False)):
        schema = {"uniqueItems": False, "anyOf": [{} for _ in range(size)]}
        tool = {"type": "function", "function": {"name": "odd", "parameters": schema}}
        request = validated({"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}, ChatRequest)
        use = ToolUse(request.tools, request.tool_choice, "hermes")
        assert ("uniqueItems" not in use.arguments["odd"]) == is_looked_through
