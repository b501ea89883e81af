"""Calls as GLM writes them, with line breaks between its tags and without."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.glm_calls import GlmCalls, written_glm_call
from deployments.tagged_values import Schemas
from deployments.tool_calls import CallDelta

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "list": {"type": "array"},
    "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
SCHEMAS: Schemas = {"f": {"type": "object", "properties": PROPERTIES}, "bare": None}


def calls_in(text: str, cut: int = 0, most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, with the text cut into pieces of that size, or not at all."""
    parser = GlmCalls(SCHEMAS, most)
    size = cut or len(text) or 1
    parsed = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
    told: list[tuple[str, str]] = []
    for delta in (part for one in parsed for part in one.parts if isinstance(part, CallDelta)):
        if delta.call_id:
            told.append((delta.name, delta.arguments))
        else:
            told[-1] = (told[-1][0], told[-1][1] + delta.arguments)
    return "".join(one.content for one in parsed), told


@pytest.mark.parametrize("between", ["\n", "", " \n "])
@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", "", ""),
        ("text", "\n\na\n", "\n\na\n"),
        ("text", 'é"\\\t</x></tool_call>\x00', 'é"\\\t</x></tool_call>\x00'),
        ("count", "5", 5),
        ("count", "five", "five"),
        ("list", '[\n  "a"\n]', ["a"]),
        ("perhaps", "null", None),
        ("perhaps", "5", "5"),
        ("unheard_of", "[1]", [1]),
        ("unheard_of", "a b", "a b"),
        ('k"é y', "1", 1),
    ],
)
def test_values_have_the_types_of_the_schema(between: str, key: str, written: str, value: Any) -> None:
    tags = ["<tool_call>f", f"<arg_key>{key}</arg_key>", f"<arg_value>{written}</arg_value>", "</tool_call>"]
    text = "Now:\n" + between.join(tags)
    for cut in (0, 1, 7):
        content, ((name, arguments),) = calls_in(text, cut)
        assert (content, name) == ("Now:\n", "f")
        read = json.loads(arguments)[key]
        assert (read, type(read)) == (value, type(value))


def test_several_calls_with_text_around() -> None:
    one = written_glm_call("f", {"text": "a", "count": 1})
    text = f"One: {one}\n<tool_call>bare</tool_call>\nTwo: {written_glm_call('bare', {'a': 'b'})}\n done"
    expected = [("f", '{"text": "a", "count": 1}'), ("bare", "{}"), ("bare", '{"a": "b"}')]
    for cut in (0, 1, 5):
        assert calls_in(text, cut) == ("One: Two: done", expected)
        assert calls_in(text, cut, most=1) == ("One: Two: done", expected[:1])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n",  # the last tag is missing
        "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>hm</tool_call>",
        "<tool_call>f\n<arg_key>text<arg_value>a</arg_value></tool_call>",
        "<tool_call>f<arg_key>text</arg_key><arg_value>a</arg_value><arg_key>count</arg_key></tool_call>",
    ],
)
def test_what_models_forget_is_made_up_for(text: str) -> None:
    following = "\n" + written_glm_call("bare", {"x": 1})
    for cut in (0, 1, 6):
        content, told = calls_in(text + following, cut)
        assert (content, told) == ("", [("f", '{"text": "a"}'), ("bare", '{"x": 1}')])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call> is how a call begins, <arg_key> how it goes on, and </tool_call> how it ends",
        "<tool_call>unknown\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>f calls f",
        "<tool_call>f\n",
        "<tool_call>f<b>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call>" + 200 * "f",
    ],
)
def test_what_is_no_call_stays_text_and_hides_none(text: str) -> None:
    for cut in (0, 1, 4):
        assert calls_in(text, cut) == (text, [])
        assert calls_in(text + written_glm_call("bare", {}), cut) == (text, [("bare", "{}")])


def test_a_call_that_is_cut_off_has_its_arguments_as_far_as_they_go() -> None:
    text = written_glm_call("f", {"text": "one\ntwo", "count": 12})
    whole = calls_in(text)[1][0][1]
    begins, ends = text.index("<arg_key>"), text.index("</tool_call>")
    for size in range(len(text)):
        content, told = calls_in(text[:size], 1)
        if size < begins + len("<arg_key>"):
            assert (content, told) == (text[:size], [])
        elif size < ends:
            ((name, arguments),) = told
            assert (content, name) == ("", "f")
            assert whole.startswith(arguments)
            assert not arguments.endswith("}")  # nobody takes it for complete
