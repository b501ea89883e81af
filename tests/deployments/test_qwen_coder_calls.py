"""Calls as Qwen3-Coder writes them, whose values have the types of the tools' schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.qwen_coder_calls import QwenCoderCalls
from deployments.tagged_values import Schemas
from deployments.tool_calls import CallDelta

CITY = {"type": "object", "properties": {"name": {"type": "string"}}}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "sure": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "string"}},
    "city": {"$ref": "#/$defs/City"},
    "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "unit": {"enum": ["C", "F", "1"]},
    "level": {"enum": ["low", 3]},
    "fixed": {"const": "5"},
    "loop": {"$ref": "#/properties/loop"},
    "lost": {"$ref": "#/$defs/Missing"},
    "odd": True,
}
SCHEMAS: Schemas = {
    "f": {"type": "object", "properties": PROPERTIES, "$defs": {"City": CITY}},
    "bare": None,
    "strange": {"properties": 5},
}


def calls_in(text: str, cut: int = 0, most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, with the text cut into pieces of that size, or not at all."""
    parser = QwenCoderCalls(SCHEMAS, most)
    size = cut or len(text) or 1
    parsed = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
    told: list[tuple[str, str]] = []
    for delta in (part for one in parsed for part in one.parts if isinstance(part, CallDelta)):
        if delta.call_id:
            told.append((delta.name, delta.arguments))
        else:
            told[-1] = (told[-1][0], told[-1][1] + delta.arguments)
    return "".join(one.content for one in parsed), told


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("text", ' "a" ', ' "a" '),
        ("text", "", ""),
        ("text", "\n\na\n\n", "\n\na\n\n"),
        ("text", 'é"\\\t</x>\x00', 'é"\\\t</x>\x00'),
        ("count", "5", 5),
        ("count", " 5 ", 5),
        ("count", "five", "five"),
        ("count", "None", None),
        ("ratio", "0.5", 0.5),
        ("ratio", "NaN", "NaN"),
        ("ratio", "1e999", 1.7976931348623157e308),
        ("sure", "true", True),
        ("sure", "False", False),
        ("list", '["a", "b"]', ["a", "b"]),
        ("list", '[\n  "a"\n]', ["a"]),
        ("list", "[" * 20_000, "[" * 20_000),
        ("list", "a, b", "a, b"),
        ("list", "['a', None]", ["a", None]),
        ("unheard_of", "['a']", "['a']"),
        ("city", '{"name": "Oslo"}', {"name": "Oslo"}),
        ("perhaps", "null", None),
        ("perhaps", "5", "5"),
        ("perhaps", "a", "a"),
        ("either", "5", 5),
        ("either", "true", "true"),
        ("either", '"5"', '"5"'),
        ("unit", "1", "1"),
        ("level", "3", 3),
        ("level", "low", "low"),
        ("fixed", "5", "5"),
        ("loop", "5", 5),
        ("lost", "5", 5),
        ("odd", "x", "x"),
        ("unheard_of", "[1]", [1]),
        ("unheard_of", "a b", "a b"),
        ('k"é y', "1", 1),
    ],
)
def test_values_have_the_types_of_the_schema(key: str, written: str, value: Any) -> None:
    text = "Now:\n" + QwenCoderCalls.written("f", {key: written})
    for cut in (0, 1, 7):
        content, ((name, arguments),) = calls_in(text, cut)
        assert (content, name) == ("Now:\n", "f")
        read = json.loads(arguments)[key]
        assert (read, type(read)) == (value, type(value))


def test_several_calls_with_text_around() -> None:
    one = QwenCoderCalls.written("f", {"text": "a", "count": 1})
    bare, strange = QwenCoderCalls.written("bare", {}), QwenCoderCalls.written("strange", {"a": "b"})
    text = f"One: {one}\n{bare}\nTwo: {strange}\n done"
    expected = [("f", '{"text": "a", "count": 1}'), ("bare", "{}"), ("strange", '{"a": "b"}')]
    for cut in (0, 1, 5):
        assert calls_in(text, cut) == ("One: Two: done", expected)
        assert calls_in(text, cut, most=1) == ("One: Two: done", expected[:1])


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>\n<parameter=text>\na\n</parameter>\n</function>",  # the outer tags are missing
        "<tool_call><function=f><parameter=text>a</parameter></function></tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\nhm</function>\n</tool_call>",
    ],
)
def test_what_models_forget_is_made_up_for(text: str) -> None:
    following = "\n" + QwenCoderCalls.written("bare", {"x": 1})
    for cut in (0, 1, 6):
        assert calls_in(text, cut) == ("", [("f", '{"text": "a"}')])
        assert calls_in(text + following, cut) == ("", [("f", '{"text": "a"}'), ("bare", '{"x": 1}')])


def test_an_argument_that_is_not_closed_ends_with_the_next() -> None:
    text = "<function=f>\n<parameter=text>\na\n<parameter=count>\n1\n</parameter>\n<tool_call>\n"
    text += "<function=bare></function>"
    assert calls_in(text, 1) == calls_in(text) == ("", [("f", '{"text": "a", "count": 1}'), ("bare", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call> is how a call begins, <function= how it goes on, and </tool_call> how it ends",
        "<tool_call>\n<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<function=f> calls f",
        "<tool_call>\n<function=f>\n",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<function=" + 80 * "f" + ">",
    ],
)
def test_what_is_no_call_stays_text_and_hides_none(text: str) -> None:
    for cut in (0, 1, 4):
        assert calls_in(text, cut) == (text, [])
        if not text.endswith("\n"):
            assert calls_in(text + QwenCoderCalls.written("bare", {}), cut) == (text, [("bare", "{}")])


def test_a_call_that_is_cut_off_has_its_arguments_as_far_as_they_go() -> None:
    text = QwenCoderCalls.written("f", {"text": "one\ntwo", "count": 12})
    whole = calls_in(text)[1][0][1]
    begins, ends = text.index("<parameter"), text.index("\n</function>")
    for size in range(len(text)):
        content, told = calls_in(text[:size], 1)
        if size < begins + len("<parameter="):
            assert (content, told) == (text[:size], [])
        elif size < ends:
            ((name, arguments),) = told
            assert (content, name) == ("", "f")
            assert whole.startswith(arguments)
            assert not arguments.endswith("}")  # nobody takes it for complete
