"""Calls while they are written: what a client has at each moment, and in the end, as of the whole answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.deepseek_calls import DeepseekCalls
from deployments.gemma_calls import QUOTE
from deployments.json_calls import JsonCalls
from deployments.json_extent import JsonExtent
from deployments.kimi_calls import KimiCalls
from deployments.tagged_values import Schemas
from deployments.tool_calls import CallDelta, ToolParser
from deployments.tool_parsers import FORMS, make_parser
from tests.examples import examples

SCHEMAS: Schemas = {
    "add": None,
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": "integer"},
            "tags": {"type": "array"},
        },
    },
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["}", '"', "</tool", "é🙂", "; [{", "\\", "</tool_call>", "[TOOL_CALLS]", "\n"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
CUTS = st.lists(st.integers(0, 400), max_size=30)
#: Those that write arguments in tags.
TAGGED = {kind: FORMS[kind].written for kind in ("glm", "minimax_m2", "qwen3_coder", "seed_oss")}
#: Those that write them as JSON between marks.
OTHER_KINDS = (
    "cohere",
    "functionary_v3",
    "gigachat3",
    "granite",
    "hunyuan_a13b",
    "kimi_k2",
    "nemotron",
    "phi4_mini",
)
#: How arguments may be written.
STYLES = st.fixed_dictionaries({"ensure_ascii": st.booleans(), "indent": st.sampled_from([None, None, 0, 1])})


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def parts(parser: ToolParser, given_pieces: list[str]) -> list[str | CallDelta]:
    """All parts in their order, with what belongs together put together, and no ids."""
    found: list[str | CallDelta] = []
    for parsed in [*map(parser.feed, given_pieces), parser.finish()]:
        for part in parsed.parts:
            last = found[-1] if found else None
            if isinstance(part, str):
                found[-1:] = [last + part] if isinstance(last, str) else [*found[-1:], part]
                continue
            assert bool(part.call_id) == bool(part.name) == (part.index == parser_index(found) + 1)
            if part.name:
                found.append(CallDelta(part.index, part.arguments, name=part.name))
            else:  # no text came between
                assert isinstance(last, CallDelta)
                found[-1] = CallDelta(last.index, last.arguments + part.arguments, name=last.name)
    return found


def parser_index(found: list[str | CallDelta]) -> int:
    return max((part.index for part in found if isinstance(part, CallDelta)), default=-1)


def written(kind: str, name: str, arguments: str) -> str:
    """A call of the kind, "forced", "mistral list" and "deepseek_v3 bare" (as V3.1 does) among them."""
    if kind == "mistral":
        return f"[TOOL_CALLS]{name}[ARGS]{arguments}"
    if kind == "deepseek_v3 bare":
        opened, closed, begun, ended, separator = DeepseekCalls.markers
        return f"{opened}{begun}{name}{separator}{arguments}{ended}{closed}"
    if kind in ("deepseek_v3", *OTHER_KINDS):
        return FORMS[kind].written(name, arguments)
    field = "parameters" if kind in ("json", "forced") else "arguments"
    body = f'{{"name": "{name}", "{field}": {arguments}}}'
    forms = {"hermes": f"<tool_call>\n{body}\n</tool_call>", "mistral list": f"[TOOL_CALLS] [{body}]"}
    return forms.get(kind, body)


def parser_of(kind: str) -> ToolParser:
    return JsonCalls(SCHEMAS, has_text=False) if kind == "forced" else make_parser(kind.split()[0], SCHEMAS)


JSON_KINDS = ["hermes", "json", "mistral", "mistral list", "forced", "deepseek_v3", "deepseek_v3 bare"]
JSON_KINDS += OTHER_KINDS


@pytest.mark.parametrize("kind", JSON_KINDS)
@examples(100)
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), STYLES, CUTS)
def test_a_stream_of_a_call_adds_up_to_the_whole(
    kind: str, arguments: dict[str, Any], form: dict[str, Any], cuts: list[int]
) -> None:
    told = json.dumps(arguments, **form)
    text = written(kind, "add", told)
    assert parts(parser_of(kind), pieces(text, cuts)) == [CallDelta(0, told, name="add")]
    assert parts(parser_of(kind), [text]) == [CallDelta(0, told, name="add")]


@pytest.mark.parametrize("kind", TAGGED)
@examples(200)
@given(
    st.fixed_dictionaries(
        {},
        optional={"path": st.text(max_size=9), "content": st.text(), "mode": st.integers(), "tags": VALUES},
    ),
    CUTS,
)
def test_a_stream_of_a_tagged_call_adds_up_to_the_whole(
    kind: str, arguments: dict[str, Any], cuts: list[int]
) -> None:
    text = TAGGED[kind]("write_file", arguments)
    ends = ("</param", "<param", "</func", "</arg_value>")
    if any(end in value for value in map(str, arguments.values()) for end in ends):
        return
    found = parts(parser_of(kind), pieces(text, cuts))
    assert found == parts(parser_of(kind), [text])
    (call,) = found
    assert isinstance(call, CallDelta)
    read = json.loads(call.arguments)
    # A string where the schema has none is read as JSON if it is some; everything else comes back as it was.
    assert {key: read[key] for key in read if not isinstance(arguments[key], str) or key != "tags"} == {
        key: value for key, value in arguments.items() if not isinstance(value, str) or key != "tags"
    }
    assert read.keys() == arguments.keys()


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_arguments_are_told_with_every_character(kind: str) -> None:
    told = json.dumps({"path": "a", "content": 'def f():\n    return "é"\n' * 3, "n": [1, {"a": None}]})
    text = written(kind, "add", told)
    begins = text.index(told)
    parser = parser_of(kind)
    assert [part for char in text[:begins] for part in parser.feed(char).parts] == []
    first, *more = [parser.feed(char).parts for char in told]
    ((opened),) = first
    assert isinstance(opened, CallDelta)
    assert (opened.name, opened.arguments) == ("add", "{")
    assert more == [[CallDelta(0, char)] for char in told[1:]]
    assert [part for char in text[begins + len(told) :] for part in parser.feed(char).parts] == []
    assert parser.finish().parts == []


@pytest.mark.parametrize("kind", TAGGED)
def test_strings_in_tags_are_told_with_every_character(kind: str) -> None:
    content = 'def f():\n    return "<é>"\n\n'
    text = TAGGED[kind]("write_file", {"path": "a", "content": content, "mode": 5})
    parser, at = make_parser(kind, SCHEMAS), text.index(content)
    told = "".join(delta.arguments for char in text[:at] for delta in parser.feed(char).calls)
    assert told == '{"path": "a", "content": "'
    for size, char in enumerate(content, 1):
        told += "".join(delta.arguments for delta in parser.feed(char).calls)
        said = json.loads(told.removeprefix('{"path": "a", "content": ') + '"')
        assert content[:size].rstrip("\n<") == said.rstrip("\n<")
    told += "".join(
        delta.arguments for char in text[at + len(content) :] for delta in parser.feed(char).calls
    )
    assert json.loads(told) == {"path": "a", "content": content, "mode": 5}


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "\n", " ", "text", "[TOOL_CALLS]", "add", "[ARGS]", "[", "]", ",", ";",
    "{", "}", '"', "\\", "<", "\u00a0", "12", "NaN", "null", '"a": 1', "<|python_tag|>",
    '{"name": "add", "arguments": {', '{"name": "add"', '{"name":', '"add", "parameters":',
    '"type": "function", ',
    '{"name": "no", "arguments": {}}', '{"name": "add", "arguments": {"a": "b"}}',
    '{"arguments": {"a": 1}, "name": "add"}', "<function=add>", "<function=no>", "<function=write_file>",
    "<parameter=path>", "<parameter=mode>", "</parameter>", "</function>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>mode</arg_key><arg_value>",
    "<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|", " to=functions.add",
    "<|channel|>commentary to=functions.add <|constrain|>json<|message|>", 600 * "-",
    *DeepseekCalls.markers, "function", "\n```json\n", "```", "<|tool_call|>", "<|/tool_call|>",
    "<TOOLCALL>", "<|tool_call>", "<tool_call|>", "call:", QUOTE, ":", "true", "a:", "<function_calls>",
    "</function_calls>", "(", ")", "add(", "a=", "'", "None", "-1.5", '<invoke name="add">',
    '<parameter name="a">', "</invoke>", "<|START_ACTION|>", "<|END_ACTION|>",
    "<|function_call|>", *KimiCalls.markers, "functions.add:1", "functions.no:0", ":2",
    '{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}', '{"tool_name": "add"}',
]  # fmt: skip


#: So that most of the texts have a call.
BEGINNINGS = {
    "cohere": ["<|START_ACTION|>[\n    ", '<|START_ACTION|>[{"tool_name": "add", "parameters": {'],
    "glm": ["<tool_call>add", "<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>", "<tool_call>"],
    "harmony": [
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{",
        "<|channel|>commentary to=",
    ],
    "hermes": ["<tool_call>", '<tool_call>{"name": "add", "arguments": {', '<tool_call>[{"name": "add"}'],
    "hunyuan_a13b": ["<tool_calls>[", '<tool_calls>[{"name": "add", "arguments": {'],
    "json": ['{"name": "add", "parameters": {', "["],
    "forced": ['[{"name": "add", "parameters": ', '[{"name": "add"'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]add{", '[TOOL_CALLS] [{"name": "add", "arguments": {'],
    "qwen3_coder": [
        "<tool_call>\n<function=write_file>\n<parameter=path>\n",
        "<function=add><parameter=k>",
        "<function=add></function>",
    ],
    "deepseek_v3": [
        f"{DeepseekCalls.OPEN}{DeepseekCalls.CALL}function{DeepseekCalls.SEPARATOR}add\n```json\n{{",
        f"{DeepseekCalls.CALL}add{DeepseekCalls.SEPARATOR}{{",
        written("deepseek_v3", "add", "{}"),
        DeepseekCalls.OPEN,
    ],
    "gemma4": [
        "<|tool_call>call:add{",
        f"<|tool_call>call:write_file{{path:{QUOTE}",
        "<|tool_call>call:add{a:[",
    ],
    "functionary_v3": ["<function=add>{", "<function=add>{}</function>", "<function="],
    "gigachat3": ["<|function_call|>", '<|function_call|>{"name": "add", "arguments": {'],
    "granite": ["<|tool_call|>[", '<|tool_call|>[{"name": "add", "arguments": {'],
    "kimi_k2": [
        f"{KimiCalls.OPEN}{KimiCalls.CALL}functions.add:0{KimiCalls.SEPARATOR}{{",
        written("kimi_k2", "add", "{}"),
        KimiCalls.OPEN,
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="path">',
        '<minimax:tool_call><invoke name="add"></invoke>\n<invoke name="add">',
    ],
    "nemotron": ["<TOOLCALL>[", '<TOOLCALL>[{"name": "add", "arguments": {'],
    "olmo3": ["<function_calls>\n", "<function_calls>add(", "<function_calls>write_file(path='"],
    "phi4_mini": ["<|tool_call|>", '<|tool_call|>[{"name": "add", "arguments": {'],
    "pythonic": ["[add(", "[add(), write_file(path='", "[add(a=1"],
    "seed_oss": [
        "<seed:tool_call>\n<function=write_file>\n<parameter=path>",
        "<seed:tool_call><function=add>",
    ],
}


@pytest.mark.parametrize("kind", [*FORMS, "forced"])
@examples(400)
@given(st.data(), st.lists(st.sampled_from(FRAGMENTS), max_size=12), CUTS)
def test_what_comes_out_does_not_depend_on_how_text_is_cut(
    kind: str, data: st.DataObject, fragments: list[str], cuts: list[int]
) -> None:
    text = data.draw(st.sampled_from(["", *BEGINNINGS[kind]])) + "".join(fragments)
    whole = parts(parser_of(kind), [text])
    assert parts(parser_of(kind), pieces(text, cuts)) == whole
    assert parts(parser_of(kind), list(text)) == whole
    if kind == "forced":
        assert all(isinstance(part, CallDelta) for part in whole)
    elif not any(isinstance(part, CallDelta) for part in whole):
        assert "".join(map(str, whole)) == text


@examples(200)
@given(
    VALUES.filter(lambda value: not isinstance(value, int | float)),
    STYLES,
    st.sampled_from(["", "}", " ,", '"x']),
    CUTS,
)
def test_a_json_value_ends_where_json_says(
    value: Any, form: dict[str, Any], after: str, cuts: list[int]
) -> None:
    text = json.dumps(value, **form)
    extent, size = JsonExtent(), 0
    for piece in pieces(text + after, cuts):
        if not extent.is_complete:
            assert size < len(text) or value is None
            size += extent.feed(piece)
    assert not extent.is_broken
    if value is not None or after:
        assert (extent.is_complete, size) == (True, len(text))


@examples(300)
@given(
    st.lists(st.sampled_from([*'{}[],:" ', '"a"', "1", "-0.5e3", "true", "01", "-", "nul", "\\"]), max_size=9)
)
def test_what_json_cannot_go_on_with_is_broken(tokens: list[str]) -> None:
    text = "{" + "".join(tokens)
    extent = JsonExtent()
    size = extent.feed(text)
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text)
        assert (extent.is_complete, size) == (True, end)
    except ValueError:
        assert not extent.is_complete or "\\" in text  # of strings only the ends are looked for
