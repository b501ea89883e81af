"""Calls that models write in Python: what their arguments are as JSON, and what is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.python_calls import written_python_call
from deployments.python_values import PythonExtent, python_value_text
from deployments.tagged_values import Schemas
from deployments.tool_parsers import FORMS, make_parser
from tests.deployments.test_tool_parsers import told
from tests.examples import examples

SCHEMAS: Schemas = {"f": None, "server.g": None}
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    SCALARS | st.sampled_from(["'", '"', "\\", "'''", ")", "]", ", b=1)", "</function_calls>", "\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_é][a-z0-9_]{0,5}", fullmatch=True), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(SCHEMAS)), ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 300), max_size=20)


def listed(calls: list[tuple[str, Any]], kind: str) -> str:
    texts = [written_python_call(name, arguments) for name, arguments in calls]
    if kind == "pythonic":
        return f"[{', '.join(texts)}]"
    return "<function_calls>" + "\n".join(texts) + "</function_calls>"


@pytest.mark.parametrize("kind", ["pythonic", "olmo3"])
@examples(200)
@given(CALLS, CUTS)
def test_arguments_are_what_python_reads(kind: str, calls: list[tuple[str, Any]], cuts: list[int]) -> None:
    text = listed(calls, kind)
    for where in (cuts, range(len(text)), []):
        content, found = told(make_parser(kind, SCHEMAS), text, list(where))
        assert (content, [(name, json.loads(arguments)) for name, arguments in found]) == ("", calls)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('"a\\"b"', 'a"b'),
        ("'''a\n'b' \"c\"'''", "a\n'b' \"c\""),
        ('""', ""),
        ('""""""', ""),
        ("true", True),
        ("null", None),
        ('{"a": true}', {"a": True}),
        ("{'a': (1, -2.5)}", {"a": [1, -2.5]}),
        (r"'\d+'", r"\d+"),
        ("'a' 'b'", "ab"),
        ("1e999", 1.7976931348623157e308),
        ("float('inf')", "float('inf')"),
        ("{1: 2}", "{1: 2}"),
        ("{1, 2}", "{1, 2}"),
        ("Paris", "Paris"),
        ("9" * 5000, "9" * 5000),
        ("[" * 300 + "]" * 300, None),
        ("", ""),
    ],
)
def test_what_is_no_literal_is_a_string(written: str, value: Any) -> None:
    read = json.loads(python_value_text(written))
    if value is None and written != "null":  # as deep as Python reads, or a string
        assert read == written or json.dumps(read).replace(" ", "") == written
    else:
        assert (read, type(read)) == (value, type(value))
    for cut in (1, 3, len(written) or 1):
        parser = make_parser("pythonic", SCHEMAS)
        text = f"[f(a={written}, b=1)]"
        pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
        parsed = [*map(parser.feed, pieces), parser.finish()]
        (_, *rest) = "".join(delta.arguments for one in parsed for delta in one.calls).partition(": ")
        assert "".join(rest).endswith(', "b": 1}') or not written


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]",
        "[f(1)]",
        "[f(a==1)]",
        "[unknown(a=1)]",
        "[unknown(a=1), f(a=1)]",
        "[f",
        "[",
        "  [f(",
        "So [f(a=1)]",
        "[see f(a=1)]",
        "f(a=1)",
        "",
        "  ",
    ],
)
def test_what_is_no_list_of_calls_is_text(text: str) -> None:
    for cuts in ([], [3], list(range(len(text)))):
        assert told(make_parser("pythonic", SCHEMAS), text, cuts) == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (" [f()] and more", "and more", ["{}"]),
        ("[f(a=1,), f(), Well", ", Well", ['{"a": 1}', "{}"]),
        ("[f(a=1); f( )", "", ['{"a": 1}', "{}"]),
        ("[f(a=1)][f(a=2)]", "[f(a=2)]", ['{"a": 1}']),
        ("[f(a=1, 2)]", "", ['{"a": 1, 2)]']),
        ("[f(a='cut", "", ['{"a": "cut']),
        ("[f(a='\\\x00')]", "", ['{"a": "\\\\\\u0000"}']),
        ("[f(a=1, b=[1", "", ['{"a": 1']),
        ("[f(a='x' + 'y')]", "", ['{"a": "x"+ \'y\')]']),
    ],
)
def test_what_models_get_wrong(text: str, content: str, calls: list[str]) -> None:
    for cuts in ([], [4], list(range(len(text)))):
        assert told(make_parser("pythonic", SCHEMAS), text, cuts) == (content, [("f", one) for one in calls])


def test_calls_within_text() -> None:
    call = FORMS["olmo3"].written("f", {"a": "x"})
    text = f"I use <function_calls> so: {call}\n<function_calls>\nno(a=1)</function_calls> {call} done"
    expected = "I use <function_calls> so: <function_calls>\nno(a=1)</function_calls> done"
    for cuts in ([], [30], list(range(len(text)))):
        assert told(make_parser("olmo3", SCHEMAS), text, cuts) == (expected, [("f", '{"a": "x"}')] * 2)


@examples(200)
@given(VALUES, st.sampled_from([",", ")", "]"]), CUTS)
def test_a_value_ends_where_python_says(value: Any, after: str, cuts: list[int]) -> None:
    text, extent, at = repr(value) + after, PythonExtent(), 0
    for size in sorted({min(cut, len(text)) for cut in cuts} | {len(text)}):
        at = extent.feed(text[:size], at)
    assert (extent.is_complete, at) == (True, len(text) - 1)
