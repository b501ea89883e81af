"""Cohere's models: calls by the name of a tool, and marks around what is thought and what is said."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from deployments.answer_marks import AnswerMarks
from deployments.api_service import ApiService
from deployments.chat_messages import ChatMessage, for_template
from deployments.cohere_calls import written_cohere_call
from deployments.openai_api import create_app
from deployments.reasoning import ReasoningParser
from deployments.tool_parsers import make_parser
from deployments.tools import ToolUse
from tests.deployments.socket_server import served
from tests.deployments.test_tool_parsers import NAMES, told
from tests.examples import examples
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids

PAIRS = (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>"))


def said(*texts: str, is_begun: bool = False) -> str:
    marks = AnswerMarks(PAIRS, is_begun=is_begun)
    return "".join([*map(marks.feed, texts), marks.finish()])


@pytest.mark.parametrize(
    ("text", "is_begun", "expected"),
    [
        ("<|START_RESPONSE|>Hi.<|END_RESPONSE|>", False, "Hi."),
        ("\n<|START_TEXT|> Hi.<|END_TEXT|>\n", False, " Hi.\n"),
        ("<|START_TEXT|>a <|END_RESPONSE|> b<|END_TEXT|>", False, "a <|END_RESPONSE|> b"),
        ("<|START_RESPONSE|>cut <|END_", False, "cut <|END_"),
        ("<|START_RES", False, "<|START_RES"),
        ("<|START_RESPONSE|>", False, ""),
        ("Hi <|START_RESPONSE|>no<|END_RESPONSE|>", False, "Hi <|START_RESPONSE|>no<|END_RESPONSE|>"),
        ("so on.<|END_RESPONSE|>", True, "so on."),
        ("so on.<|END_RESPONSE|>", False, "so on.<|END_RESPONSE|>"),
        (
            "<|START_RESPONSE|>a<|END_RESPONSE|><|START_ACTION|>[<|END_RESPONSE|>",
            False,
            "a<|START_ACTION|>[<|END_RESPONSE|>",
        ),
        ("", False, ""),
        (" ", False, " "),
    ],
)
def test_marks_around_a_text_are_left_out(text: str, is_begun: bool, expected: str) -> None:
    assert said(text, is_begun=is_begun) == said(*text, is_begun=is_begun) == expected


@examples(200)
@given(
    st.lists(st.sampled_from([*sum(PAIRS, ()), "<|", "<|START_", "<|END_", " ", "\n", "a"]), max_size=8),
    st.booleans(),
    st.data(),
)
def test_the_cut_makes_no_difference(pieces: list[str], is_begun: bool, data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.sets(st.integers(0, len(text))))
    cut = [text[begin:end] for begin, end in pairwise(sorted({0, len(text), *cuts}))]
    assert said(*cut, is_begun=is_begun) == said(text, is_begun=is_begun)


def test_tokens_around_what_is_said_are_seen() -> None:
    """Detokenizers leave out special tokens that nobody asks for."""
    assert {mark for pair in PAIRS for mark in pair} <= {*ReasoningParser("cohere", is_open=False).markers}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": [{"b": "]<|END_ACTION|>"}]}}', None),
        ('{"tool_name": "add", "tool_call_id": "12", "parameters": {"a":"\\ud83d\\ude42"} }', None),
        ('{"tool_call_id": 0, "tool_name": "add", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"parameters": {"a": 1}, "tool_name": "add"}', '{"a": 1}'),
        ('{"tool_name": "add"}', "{}"),
    ],
)
def test_calls_by_the_name_of_a_tool(body: str, arguments: str | None) -> None:
    written = arguments or body[body.index('"parameters": ') + 14 : body.rindex("}")].rstrip()
    text = f"I will. <|START_ACTION|>[\n    {body},\n    {body}\n]<|END_ACTION|>\n"
    for cuts in ([], list(range(len(text)))):
        assert told(make_parser("cohere", NAMES), text, cuts) == ("I will. ", [("add", written)] * 2)


@pytest.mark.parametrize(
    "body", ['{"name": "add", "parameters": {}}', '{"tool_name": "no", "parameters": {}}']
)
def test_what_names_no_tool_is_text(body: str) -> None:
    text = f"<|START_ACTION|>[{body}]<|END_ACTION|>"
    for cuts in ([], list(range(len(text)))):
        assert told(make_parser("cohere", NAMES), text, cuts) == (text, [])


@pytest.mark.parametrize("per_step", [1, 7, 1000])
async def test_a_thought_an_answer_and_calls_in_every_api(cell: CellStandIn, per_step: int) -> None:
    cell.max_tokens, cell.per_step = 4096, per_step
    schema = {"type": "object"}
    call = written_cohere_call("look", {"a": 1})
    thought = "<|START_THINKING|>hm<|END_THINKING|>"
    service = ApiService(cell, codec(), tool_parser="cohere", reasoning_parser="cohere")
    asked: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
    tool = {"name": "look", "parameters": schema}
    async with served(create_app(service)) as url, httpx.AsyncClient(base_url=url) as http:
        for text, content, num in (
            (f"{thought}<|START_RESPONSE|>Hi.<|END_RESPONSE|>", "Hi.", 0),
            (thought + call, "", 1),
            (f"{thought}<|START_RESPONSE|>So: <|END_RESPONSE|>{call}", "So: ", 1),
        ):
            cell.script = lambda submit, text=text: [*ids(text), *codec().eos_ids]
            chat = asked | {"tools": [{"type": "function", "function": tool}]}
            answer = (await http.post("/v1/chat/completions", json=chat)).raise_for_status().json()
            message = answer["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"] or "") == ("hm", content)
            assert len(message.get("tool_calls") or ()) == num
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as client:
                chunks = [one async for one in await client.chat.completions.create(stream=True, **chat)]
            assert "".join(one.choices[0].delta.content or "" for one in chunks) == content
            messages = asked | {
                "max_tokens": 999,
                "tools": [{"name": "look", "input_schema": schema}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }
            blocks = (await http.post("/v1/messages", json=messages)).raise_for_status().json()["content"]
            kinds = ["thinking", *["text"] * bool(content), *["tool_use"] * num]
            assert [block["type"] for block in blocks] == kinds
            response = {"model": "demo", "input": "hello", "tools": [{"type": "function", **tool}]}
            output = (await http.post("/v1/responses", json=response)).raise_for_status().json()["output"]
            assert [item["type"] for item in output] == [
                "reasoning",
                *["message"] * bool(content),
                *["function_call"] * num,
            ]
    await service.close()


def test_templates_are_given_a_thought_before_calls_by_their_name_for_it() -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": json.dumps({})}}
    messages = [
        ChatMessage.model_validate({"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]})
    ]
    for kind, plan in (("cohere", "hm"), ("hermes", None)):
        (made,) = for_template(messages, ToolUse(None, None, kind), knows_tools=True, parser=kind)
        assert (made["reasoning_content"], made.get("tool_plan")) == ("hm", plan)
