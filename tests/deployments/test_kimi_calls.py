"""Kimi K2's calls keep the ids that the model writes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from deployments.api_service import ApiService
from deployments.kimi_calls import KimiCalls
from deployments.openai_api import create_app
from deployments.tool_parsers import make_parser
from tests.deployments.socket_server import served
from tests.deployments.test_tool_parsers import NAMES, told
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED: dict[str, Any] = {
    "model": "demo",
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "functions.add:0", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "functions.add:0", "content": "1"},
    ],
}


def written(*ids: str, arguments: str = "{}") -> str:
    calls = [f"{KimiCalls.CALL}{one}{KimiCalls.SEPARATOR}{arguments}{KimiCalls.CALL_END}" for one in ids]
    return KimiCalls.OPEN + "".join(calls) + KimiCalls.CLOSE


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["functions.add:3", "functions.get_weather:4"], ["functions.add:3", "functions.get_weather:4"]),
        (["add:0", " functions.add:1 \n"], ["add:0", "functions.add:1"]),
        # Clients tell calls apart by them.
        (["functions.add:0"] * 3, ["functions.add:0", "functions.add:1", "functions.add:2"]),
        (
            ["functions.add:1"] * 2 + ["functions.add:2"],
            ["functions.add:1", "functions.add:2", "functions.add:3"],
        ),
    ],
)
def test_ids_are_as_they_are_written(given: list[str], expected: list[str]) -> None:
    parser = make_parser("kimi_k2", NAMES)
    parsed = [*map(parser.feed, written(*given)), parser.finish()]
    calls = [delta for one in parsed for delta in one.calls if delta.call_id]
    assert [call.call_id for call in calls] == expected
    assert "".join(one.content for one in parsed) == ""


def test_text_before_calls_and_marks_within_arguments() -> None:
    arguments = '{"a": "<|tool_call_end|>}", "b": [{"c": "\\u00e9 \\"q\\""}]}'
    text = "Well. " + written("functions.add:0", "functions.add:1", arguments=arguments)
    for cuts in ([], list(range(len(text)))):
        assert told(make_parser("kimi_k2", NAMES), text, cuts) == ("Well. ", [("add", arguments)] * 2)


@pytest.mark.parametrize("head", ["functions.no:0", "functions.add", "functions.add:x", "functions:0"])
def test_what_names_no_function_is_text(head: str) -> None:
    text = f"{KimiCalls.OPEN}{KimiCalls.CALL}{head}{KimiCalls.SEPARATOR}{{}}"
    for cuts in ([], list(range(len(text)))):
        assert told(make_parser("kimi_k2", NAMES), text, cuts) == (text, [])


async def test_forced_calls_are_counted_on_from_the_conversation_s(cell: CellStandIn) -> None:
    """As the model counts its own: with the same ids, results of one would be taken for another's."""
    cell.max_tokens = 4096
    service = ApiService(cell, codec(), tool_parser="kimi_k2")
    named = {"type": "function", "function": {"name": "add"}}
    one = '{"name": "add", "parameters": {}}'
    async with served(create_app(service)) as url, httpx.AsyncClient(base_url=url) as http:
        for choice, text, expected in (
            ("required", f"[{one}, {one}]", ["functions.add:1", "functions.add:2"]),
            (named, "{}", ["functions.add:1"]),
            ("auto", written("functions.add:7"), ["functions.add:7"]),
        ):
            cell.script = lambda submit, text=text: [*ids(text), *codec().eos_ids]
            answer = await http.post("/v1/chat/completions", json=ASKED | {"tool_choice": choice})
            calls = answer.raise_for_status().json()["choices"][0]["message"]["tool_calls"]
            assert [call["id"] for call in calls] == expected
    await service.close()
