"""Calls in a model's output, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.call_objects import _HEAD
from deployments.json_calls import JsonCalls, NamedCall
from deployments.tagged_values import Schemas
from deployments.tool_calls import LONGEST_NAME, CallDelta, ToolParser
from deployments.tool_parsers import FORMS, make_parser, new_id_of
from deployments.tools import NAME
from tests.examples import examples

NAMES: Schemas = {"add": None, "get_weather": None}
ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none()
        | st.integers()
        | st.text(max_size=8)
        | st.sampled_from(["}", '"', "</tool", "é🙂", "; [{"]),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)


def parse(parser: ToolParser, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls with their arguments read, with the text cut at the given places."""
    content, calls = told(parser, text, cuts)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def told(parser: ToolParser, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """The same with the text of the arguments."""
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    parsed = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    deltas = [delta for one in parsed for delta in one.calls]
    return "".join(one.content for one in parsed), assembled(deltas)


def assembled(deltas: list[CallDelta]) -> list[tuple[str, str]]:
    """Name and arguments of each call, as a client puts the deltas together."""
    names: dict[int, str] = {}
    texts: dict[int, str] = {}
    for delta in deltas:
        if delta.call_id:
            assert delta.index not in names
            names[delta.index] = delta.name
        texts[delta.index] = texts.get(delta.index, "") + delta.arguments
    assert sorted(names) == list(range(len(names)))
    return [(names[index], texts[index]) for index in sorted(names)]


@examples(150)
@given(st.text(max_size=20), CALLS, st.lists(st.integers(0, 300), max_size=20))
def test_hermes_calls_within_text(before: str, calls: list[tuple[str, Any]], cuts: list[int]) -> None:
    blocks = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    text = before + "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)
    if "</tool_call>" in "".join(blocks) or "<tool_call>" in before:
        return
    assert parse(make_parser("hermes", NAMES), text, cuts) == (before, calls)


@examples(150)
@given(
    CALLS,
    st.sampled_from([";", "; ", "\n", "list"]),
    st.booleans(),
    st.lists(st.integers(0, 300), max_size=20),
)
def test_json_calls(calls: list[tuple[str, Any]], form: str, tagged: bool, cuts: list[int]) -> None:
    blocks = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    text = f"[{', '.join(blocks)}]" if form == "list" else form.join(blocks)
    text = "<|python_tag|>" + text if tagged else text
    assert parse(make_parser("json", NAMES), text, cuts) == ("", calls)


@examples(150)
@given(
    st.text(max_size=20),
    CALLS,
    st.sampled_from(["list", "{name}", "{name}[ARGS]", "{name}[CALL_ID]VvvODy9mT[ARGS]"]),
    st.lists(st.integers(0, 300), max_size=20),
)
def test_mistral_calls(before: str, calls: list[tuple[str, Any]], form: str, cuts: list[int]) -> None:
    if form == "list":
        told = [{"name": name, "arguments": arguments, "id": "VvvODy9mT"} for name, arguments in calls]
        text = f"{before}[TOOL_CALLS] {json.dumps(told)}"
    else:
        heads = [f"[TOOL_CALLS]{form.format(name=name)}" for name, _ in calls]
        text = before + "\n".join(map(str.__add__, heads, [json.dumps(one) for _, one in calls]))
    assert parse(make_parser("mistral", NAMES), text, cuts) == (before, calls)


def test_text_between_and_after_calls_of_mistral_s_is_text() -> None:
    text = 'one [TOOL_CALLS]add{"a": 1} two [TOOL_CALLS]no{} [TOOL_CALLS][{"name": "add"}] three'
    expected = ("one two [TOOL_CALLS]no{} three", [("add", {"a": 1}), ("add", {})])
    for cuts in ([], [3], list(range(len(text)))):
        assert parse(make_parser("mistral", NAMES), text, cuts) == expected


@pytest.mark.parametrize("kind", FORMS)
def test_ids_have_the_form_that_templates_demand(kind: str) -> None:
    call = {"name": "add", "arguments": {}}
    new_id = new_id_of(kind)
    form = {"mistral": r"[a-zA-Z0-9]{9}", "kimi_k2": r"functions\.add:0"}.get(kind, r"call_[0-9a-f]{24}")
    parsers: list[tuple[ToolParser, str]] = [
        (make_parser(kind, NAMES), FORMS[kind].written("add", {})),
        (JsonCalls(NAMES, has_text=False, new_id=new_id), json.dumps([call])),
        (JsonCalls(NAMES, has_text=False, new_id=new_id), json.dumps([call])[:-2]),
        (NamedCall("add", new_id), "{}"),
    ]
    for parser, text in parsers:
        found = [delta for parsed in (parser.feed(text), parser.finish()) for delta in parsed.calls]
        assert [bool(re.fullmatch(form, delta.call_id)) for delta in found] == [True]


ODD = [
    "plain text",
    "a < b and <tool_ is no call",
    '<tool_call>{"name": "add", "argu',
    "<tool_call>not json</tool_call> and on",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '{"name": "unknown", "parameters": {}}',
    '{"a": 1} is JSON',
    "[1, 2, 3]",
    "[{ no",
    "{",
    "<|python",
    '  {"name": "add", "parameters": 5}',
    "[TOOL_CALLS] [not JSON",
    "[TOOL_CALLS] [1, 2] and [TOOL_",
    '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}] and on',
    '[TOOL_CALLS]unknown{"a": 1}',
    "[TOOL_CALLS]add and no object",
    "[TOOL_CALLS]add" + 300 * " " + "{}",
    "[TOOL_CALLS]" + 60 * "long " + "{}",
    '[TOOL_CALLS] [{"name": "add", "arguments": ',
    '<tool_call>{"arguments": {"a": 1}, "name": "add"',
    '<tool_call>{"name": "add", "arguments": nothing}</tool_call>',
    '<tool_call>{"name": "add</tool_call>", "arguments": {}}</tool_call>',
    "<tool_call>[</tool_call> and <tool_call>[{</tool_call>",
    '{"name": "add", "arguments": "of what',
    "[TOOL_CALLS] \n",
    "<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>commentary<|message|>First, <|channel|>commentary to=functions.add",
    "<|channel|>commentary to=functions.add " + 600 * "-" + "<|message|>{}",
    "<|start|>assistant to=user<|channel|>final<|message|>{}<|ca",
]


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("text", ODD)
def test_what_is_no_call_stays_text(kind: str, text: str) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        cuts = [chance.randrange(len(text) + 1) for _ in range(chance.randrange(6))]
        assert parse(make_parser(kind, NAMES), text, cuts) == (text, [])


def test_a_last_call_that_is_not_closed_counts() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}'
    assert parse(make_parser("hermes", NAMES), text, []) == ("", [("add", {"a": 1})])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n' * 3),
        ("json", '{"name": "add", "parameters": {}};' * 3),
        ("mistral", '[TOOL_CALLS] [{"name": "add"}, {"name": "add"}]'),
        ("mistral", "[TOOL_CALLS]add{}" * 3),
    ],
)
def test_no_more_calls_than_allowed(kind: str, text: str) -> None:
    assert parse(make_parser(kind, NAMES, 1), text, [30, 60]) == ("", [("add", {})])


@examples(150)
@given(CALLS, st.integers(0, 300), st.lists(st.integers(0, 300), max_size=20), st.sampled_from([None, 1]))
def test_a_forced_answer_that_is_cut_off_is_calls_and_no_text(
    calls: list[tuple[str, Any]], length: int, cuts: list[int], most: int | None
) -> None:
    text, begun = "[", []
    for name, arguments in calls[:most]:
        text += ", " if len(text) > 1 else ""
        named = len(text) + len(f'{{"name": "{name}"')
        opened = named + len(', "parameters": ')
        text += json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
        if length >= named:
            begun.append((name, text[opened : min(length, len(text) - 1)]))
    text += "]"
    parser = JsonCalls(NAMES, most, has_text=False)
    assert told(parser, text[:length], cuts) == ("", begun)
    assert parser.num_calls == len(begun)


def test_json_nested_beyond_reading_fails_nothing() -> None:
    deep = '{"a": ' * 100_000
    text = '{"name": "add", "parameters": ' + deep
    assert told(JsonCalls(NAMES), text, [30, 50_000]) == ("", [("add", deep)])
    late = f'{{"arguments": {deep}1{"}" * 100_000}, "name": "add"}}'
    assert told(JsonCalls(NAMES), late, [30, 50_000]) == (late, [])


def test_arguments_of_a_forced_call_may_be_of_any_type() -> None:
    text = '[{"name": "add", "parameters": [1, 2]}]'
    assert parse(JsonCalls(NAMES, has_text=False), text, [5, 9]) == ("", [("add", [1, 2])])
    assert parse(JsonCalls(NAMES), text, [5, 9]) == (text, [])


@pytest.mark.parametrize("name", ["[]", "{}", "1", "null"])
@pytest.mark.parametrize("kind", ["hermes", "json"])
def test_a_name_that_is_no_string_names_no_tool(kind: str, name: str) -> None:
    text = f'{{"name": {name}, "arguments": {{}}}}'
    text = f"<tool_call>{text}</tool_call>" if kind == "hermes" else text
    assert parse(make_parser(kind, NAMES), text, [7, 13]) == (text, [])


@pytest.mark.parametrize("kind", FORMS)
def test_calls_of_the_longest_names_are_found(kind: str) -> None:
    name = "server." + "n" * (LONGEST_NAME - 7)
    assert re.fullmatch(NAME, name)
    assert not re.fullmatch(NAME, name + "n")
    text = FORMS[kind].written(name, {})
    for cuts in ([], [99], list(range(len(text)))):
        assert told(make_parser(kind, {name: None}), text, cuts) == ("", [(name, "{}")])


@pytest.mark.parametrize(
    "written", [r'"\ud83d"', r'"\ud83d\ude42"', "1e999", "[1,\n  2 ]", r'"\u0041\/"', "1.50", '"\n"', '"\\d"']
)
def test_arguments_are_told_as_they_are_written(written: str) -> None:
    arguments = f'{{"a":{written} }}'
    body = f'{{"name": "add", "parameters": {arguments}}}'
    for parser, text in (
        (make_parser("hermes", NAMES), f"<tool_call>{body}</tool_call>"),
        (make_parser("json", NAMES), body),
        (make_parser("mistral", NAMES), f"[TOOL_CALLS][{body}]"),
        (make_parser("mistral", NAMES), f"[TOOL_CALLS]add{arguments}"),
        (JsonCalls(NAMES, has_text=False), f"[{body}]"),
        (JsonCalls(NAMES, has_text=False), f"[{body[:-1]}"),  # cut off
    ):
        assert told(parser, text, [35, 44]) == ("", [("add", arguments)])


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (r'"\ud83d"', r'"\ud83d"'),  # half of a pair is in no UTF-8
        (r'"\ud83d\ude42"', '"🙂"'),
        ("1e999", "1.7976931348623157e+308"),
        ("-1e999", "-1.7976931348623157e+308"),
    ],
)
def test_arguments_before_the_name_are_told_as_json_that_can_be_sent(written: str, shown: str) -> None:
    body = f'{{"parameters": {{"a":{written}}}, "name": "add"}}'
    for parser, text in (
        (make_parser("hermes", NAMES), f"<tool_call>{body}</tool_call>"),
        (make_parser("json", NAMES), body),
        (make_parser("mistral", NAMES), f"[TOOL_CALLS][{body}]"),
    ):
        ((name, arguments),) = told(parser, text, [20, 30])[1]
        assert (name, arguments) == ("add", f'{{"a": {shown}}}')
        assert arguments.encode()


def test_a_call_with_its_arguments_first_is_no_call_if_they_are_no_json() -> None:
    body = '{"arguments": {"a": NaN}, "name": "add"}'
    for kind, text in (("hermes", f"<tool_call>{body}</tool_call>"), ("json", body)):
        assert told(make_parser(kind, NAMES), text, [20]) == (text, [])


# What is behind a call that broke off is told, too, and the next one.
NEXT = ("add", "{}")


@pytest.mark.parametrize(
    "broken", ['{"a": NaN}}', '{"a": "say "hi""}}', '{"a": 1, ', "{]", '{"a" 1}}', "{1}"]
)
def test_a_call_that_turns_out_to_be_no_json_stays_one_up_to_its_end(broken: str) -> None:
    body = f'{{"name": "get_weather", "arguments": {broken}'
    hermes = f'A<tool_call>{body}</tool_call>B<tool_call>{{"name": "add", "arguments": {{}}}}</tool_call>'
    mistral = f"A[TOOL_CALLS][{body}[TOOL_CALLS]add{{}}B"
    newer = f"A[TOOL_CALLS]get_weather{broken}[TOOL_CALLS]add{{}}B"
    for kind, text in (("hermes", hermes), ("mistral", mistral), ("mistral", newer)):
        for cuts in ([], [60], list(range(len(text)))):
            parser = make_parser(kind, NAMES)
            assert told(parser, text, cuts) == ("AB", [("get_weather", broken), NEXT])
    for cuts in ([], list(range(len(body)))):
        assert told(make_parser("json", NAMES), body, cuts) == ("", [("get_weather", broken)])


@pytest.mark.parametrize("end", ["", "}", "</tool_call>", "}</tool_call>", "}\n</tool_", "\n</tool_call>\n"])
def test_a_call_that_is_not_closed_properly_counts(end: str) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"a": 1}' + end
    for more, calls in (("", []), ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', [NEXT])):
        if more and end.endswith("_"):
            continue
        for cuts in ([], list(range(200))):
            found = told(make_parser("hermes", NAMES), text + more, cuts)
            assert found == ("", [("get_weather", '{"a": 1}'), *calls])


@pytest.mark.parametrize(
    "before",
    [
        "<think>I may write <tool_call> here</think>",
        "<tool_call>",
        "<tool_call>{ or so: <tool_call>[",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>not JSON</tool_call>\n",
        '<tool_call>{"name": "add"</tool_call>',
        '<tool_call>{"name": "add", </tool_call> <tool_call>{"',  # as if the next one were in a string
    ],
)
def test_a_call_is_found_behind_what_only_looks_like_one(before: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for cuts in ([], list(range(200))):
        assert told(make_parser("hermes", NAMES), f"{before}{call}\n!", cuts) == (f"{before}!", [NEXT])


def test_text_is_not_held_back_for_a_call_that_was_only_mentioned() -> None:
    parser = make_parser("hermes", NAMES)
    assert parser.feed("I may write <tool_call> he").content == "I may write <tool_call> he"
    assert parser.feed("re.").content == "re."


def test_tags_within_arguments_are_arguments() -> None:
    arguments = json.dumps({"a": "<tool_call></tool_call>[TOOL_CALLS]", "b": ['"</tool_call>']})
    call = f'{{"name": "add", "arguments": {arguments}}}'
    for kind, text in (
        ("hermes", f"<tool_call>{call}</tool_call>"),
        ("mistral", f"[TOOL_CALLS][{call}]"),
        ("mistral", f"[TOOL_CALLS]add{arguments}"),
    ):
        for cuts in ([], list(range(len(text)))):
            assert told(make_parser(kind, NAMES), text, cuts) == ("", [("add", arguments)])


@pytest.mark.parametrize(
    ("kind", "before"), [("hermes", "<tool_call>"), ("json", ""), ("mistral", "[TOOL_CALLS] [")]
)
def test_objects_that_are_no_calls_are_read_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, before: str
) -> None:
    """Looked at from its beginning with each token, an answer of 8,000 tokens took half a minute."""

    class Counted:
        number = 0

        def match(self, text: str, place: int) -> re.Match[str] | None:
            Counted.number += 1
            return _HEAD.match(text, place)

    monkeypatch.setattr("deployments.call_objects._HEAD", Counted())
    text = before + '{"answer": "' + "word { " * 500 + '", "more": {"name": ["add"]}, "last": [1]}'
    content, calls = told(make_parser(kind, NAMES), text, list(range(0, len(text), 4)))
    assert (content, calls) == (text, [])
    assert Counted.number <= 1
