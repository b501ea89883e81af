"""Calls in Gemma 4's notation: what their arguments are as JSON, while they are written and in the end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.gemma_calls import QUOTE, written_gemma_call
from deployments.tagged_values import Schemas
from deployments.tool_parsers import make_parser
from tests.deployments.test_tool_parsers import told
from tests.examples import examples

SCHEMAS: Schemas = {"f": None, "server.g": None}
TEXTS = (st.text() | st.sampled_from(["}", ",", ':"', "<|", "\\", "<tool_call|>", "\n"])).filter(
    lambda text: QUOTE not in text + QUOTE[:1] and not text.endswith("<|") and not text.endswith('<|"')
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
KEYS = st.from_regex(r"[a-zA-Z_é][a-zA-Z0-9_ -]{0,5}[a-z]", fullmatch=True)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(SCHEMAS)), st.dictionaries(KEYS, VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


@examples(300)
@given(CALLS, st.lists(st.integers(0, 300), max_size=20))
def test_arguments_come_back(calls: list[tuple[str, Any]], cuts: list[int]) -> None:
    text = "".join(written_gemma_call(name, arguments) for name, arguments in calls)
    for where in (cuts, range(len(text)), []):
        content, found = told(make_parser("gemma4", SCHEMAS), "Now: " + text, list(where))
        assert (content, [(name, json.loads(one)) for name, one in found]) == ("Now: ", calls)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("{}", {}),
        ("{ }", {}),
        (f"{{a:{QUOTE}{QUOTE}}}", {"a": ""}),
        ("{a:1,}", {"a": 1}),
        ("{a:[1,],b:[]}", {"a": [1], "b": []}),
        ("{a : 1 , b:true}", {"a": 1, "b": True}),
        ("{a:True,b:None}", {"a": True, "b": None}),
        ('{a:"x, \\"y\\"",b:1}', {"a": 'x, "y"', "b": 1}),
        ('{"a b":1}', {"a b": 1}),
        (f"{{{QUOTE}a:b{QUOTE}:1}}", {"a:b": 1}),
        ("{a:New York,b:2024-01-01}", {"a": "New York", "b": "2024-01-01"}),
        ("{a:1e999}", {"a": 1.7976931348623157e308}),
        (f"{{a:{QUOTE}one\ntwo\\n{QUOTE}}}", {"a": "one\ntwo\\n"}),
        ("{a:{b:[{c:null}]}}", {"a": {"b": [{"c": None}]}}),
    ],
)
def test_values(written: str, value: Any) -> None:
    text = f"<|tool_call>call:f{written}<tool_call|>"
    for cuts in ([], [20], list(range(len(text)))):
        content, ((name, arguments),) = told(make_parser("gemma4", SCHEMAS), text, cuts)
        assert (content, name, json.loads(arguments)) == ("", "f", value)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{a:[1}", '{"a": [1}'),
        ("{a:}", '{"a": }'),
        ("{:1}", "{:1}"),
        ("{a:1,:2}", '{"a": 1, :2}'),
        ('{a:"b"c}', '{"a": "b"c}'),
    ],
)
def test_what_is_not_in_the_notation_is_told_as_it_is(written: str, arguments: str) -> None:
    text = f"<|tool_call>call:f{written}<tool_call|>"
    for cuts in ([], [20], list(range(len(text)))):
        assert told(make_parser("gemma4", SCHEMAS), text + " then", cuts) == ("then", [("f", arguments)])


@pytest.mark.parametrize(
    "text",
    ["<|tool_call>", "<|tool_call>call:no{a:1}<tool_call|>", "<|tool_call>call:f", "<|tool_call>f{}", "f{}"],
)
def test_what_is_no_call_stays_text_and_hides_none(text: str) -> None:
    for cuts in ([], [3], list(range(len(text)))):
        assert told(make_parser("gemma4", SCHEMAS), text, cuts) == (text, [])
        followed = text + " " + written_gemma_call("f", {})
        assert told(make_parser("gemma4", SCHEMAS), followed, cuts) == (text + " ", [("f", "{}")])


def test_strings_are_told_with_every_character() -> None:
    content = 'def f():\n    return "<é>"\n'
    text = written_gemma_call("f", {"a": content})
    parser, at = make_parser("gemma4", SCHEMAS), text.index(content)
    arguments = "".join(delta.arguments for char in text[:at] for delta in parser.feed(char).calls)
    assert arguments == '{"a": "'
    for size, char in enumerate(content, 1):
        arguments += "".join(delta.arguments for delta in parser.feed(char).calls)
        said = json.loads(arguments.removeprefix('{"a": ') + '"')
        assert content[:size].rstrip("<") == said.rstrip("<")
