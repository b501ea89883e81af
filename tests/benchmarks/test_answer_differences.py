"""How two servers' answers to one request are compared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.answer_differences import Difference, of_stream, of_values
from tests.examples import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-100, 100) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@examples(100)
@given(VALUES)
def test_no_value_differs_from_itself(value: Any) -> None:
    assert of_values(value, json.loads(json.dumps(value))) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, Difference("b", "missing", "", "2")),
        ({"a": 1, "b": 2}, {"a": 1}, Difference("b", "added", "2", "")),
        ({"a": None}, {"a": 0}, Difference("a", "missing", "", "0")),
        ({"a": True}, {"a": 1}, Difference("a", "type", "true", "1")),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, Difference("a.b", "value", '"x"', '"y"')),
        ({"a": [1]}, {"a": [1, 2]}, Difference("a[]", "value", "[1]", "[1, 2]")),
        ({"a": -1.25}, {"a": -1.26}, Difference("a", "value", "-1.25", "-1.26")),
        ({"id": "x"}, {"id": 3}, Difference("id", "type", '"x"', "3")),
    ],
)
def test_one_difference_is_found(ours: Any, theirs: Any, difference: Difference) -> None:
    assert of_values(ours, theirs) == [difference]


def test_what_says_the_same_does_not_differ() -> None:
    assert of_values({"id": "x", "a": None, "b": -1.25}, {"id": "y", "b": -1.2501}) == []


def test_items_of_a_list_differ_once() -> None:
    ours = {"a": [{"b": 1}, {"b": 2}, {"c": 1}]}
    theirs = {"a": [{"b": 3}, {"b": 4}, {"c": "1"}]}
    assert of_values(ours, theirs) == [
        Difference("a[].b", "value", "1", "3"),
        Difference("a[].c", "type", "1", '"1"'),
    ]


def chunk(**choice: Any) -> str:
    return json.dumps(
        {"id": "x", "object": "chunk", "choices": [{"index": 0, "finish_reason": None} | choice]}
    )


def test_a_stream_is_the_same_wherever_its_text_was_cut() -> None:
    role, end = chunk(delta={"role": "assistant"}), chunk(delta={}, finish_reason="stop")
    whole = of_stream([role, chunk(delta={"content": "aaab"}), end, "[DONE]"])
    cut = of_stream([role, *(chunk(delta={"content": letter}) for letter in "aaab"), end, "[DONE]"])
    assert whole == cut
    assert whole["done"]
    assert whole["order"] == ["choices"]
    assert whole["choices"] == [{"finish_reason": "stop", "delta": {"role": "assistant", "content": "aaab"}}]


def test_calls_in_a_stream_are_joined_by_their_index() -> None:
    def call(index: int, **function: str) -> str:
        return chunk(delta={"tool_calls": [{"index": index, "function": function}]})

    found = of_stream(
        [
            call(0, name="look", arguments=""),
            call(1, name="see"),
            call(0, arguments="{"),
            call(0, arguments="}"),
        ]
    )
    functions = [entry["function"] for entry in found["choices"][0]["delta"]["tool_calls"]]
    assert functions == [{"name": "look", "arguments": "{}"}, {"name": "see"}]
    assert not found["done"]


def test_typed_events_keep_their_order_and_join_what_they_add() -> None:
    added = [{"type": "add", "delta": {"type": "text", "text": letter}} for letter in "aab"]
    events = [
        {"type": "start", "text": ""},
        *added,
        {"type": "end", "n": 2},
        {"type": "end", "n": 3},
        added[0],
    ]
    found = of_stream([json.dumps(event) for event in events])
    assert found["order"] == ["start", "add", "end", "add"]
    assert found["fields"]["add"] == {"type": "add", "delta": {"type": "text", "text": "aaba"}}
    assert found["fields"]["end"] == {"type": "end", "n": 3}
