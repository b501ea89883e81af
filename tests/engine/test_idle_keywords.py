"""What constrains nothing is left out of schemas, and nothing else, so that they mean the same."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine.idle_keywords import without_idle
from tests.examples import examples

KNOWN = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
UNKNOWN = (
    *("path", "binary", "password", "uri-template", "json-pointer", "iri", "regex", "int64", "double"),
    *("", "\0", '"', "é", "path" * 99),
)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_format_that_is_not_known_is_a_remark(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert without_idle(schema, formats=True) == {"type": "string"}
    assert without_idle(schema, formats=False) == schema
    assert without_idle({"propertyNames": schema}, formats=True) == {}


@pytest.mark.parametrize("name", KNOWN)
def test_a_format_that_is_known_stays(name: str) -> None:
    schema = {"type": "string", "format": name}
    for one in (schema, {"propertyNames": schema}):
        assert without_idle(one, formats=True) == one


IDLE: dict[str, Any] = {"format": "path", "uniqueItems": False, "propertyNames": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        (True, True),
        (IDLE, {}),
        ({"propertyNames": True}, {}),
        ({"propertyNames": {"type": ["string"], "description": "a name"}}, {}),
        ({"items": IDLE, "not": IDLE}, {"items": {}, "not": {}}),
        ({"items": [IDLE, True], "anyOf": [IDLE]}, {"items": [{}, True], "anyOf": [{}]}),
        ({"properties": {"a": {"contains": IDLE}}}, {"properties": {"a": {"contains": {}}}}),
        ({"$defs": {"format": IDLE}, "required": ["a"]}, {"$defs": {"format": {}}, "required": ["a"]}),
        ({"dependencies": {"a": IDLE, "format": ["a"]}}, {"dependencies": {"a": {}, "format": ["a"]}}),
    ],
)  # fmt: skip
def test_left_out(schema: Any, left: Any) -> None:
    before = copy.deepcopy(schema)
    assert without_idle(schema, formats=True) == left
    assert schema == before


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {name: {"type": "integer"} for name in IDLE}},
        {"properties": IDLE, "required": ["format"]},  # three properties, one of which is no schema
        {"const": IDLE, "enum": [IDLE], "default": IDLE, "examples": [IDLE]},
        {"x-generator": IDLE, "format": 5},
        {"uniqueItems": True},
        {"uniqueItems": 0},
        {"propertyNames": False},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": {"type": "string", "maxLength": 3}},
        {"propertyNames": {"enum": ["a"]}},
    ],
)
def test_left_as_it_is(schema: Any) -> None:
    assert without_idle(schema, formats=True) == schema


def test_schemas_may_be_nested_deeper_than_the_stack() -> None:
    schema: dict[str, Any] = dict(IDLE)
    for _ in range(50_000):
        schema = {"items": schema}
    left, depth = without_idle(schema, formats=True), 0
    while left:
        left, depth = left["items"], depth + 1
    assert depth == 50_000


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        (
            {"type": ["string"], "nullable": True, "maxLength": 2},
            {"type": ["string", "null"], "maxLength": 2},
        ),
        ({"type": ["null", "string"], "nullable": True}, {"type": ["null", "string"]}),
        (
            {"type": "string", "enum": ["a", None], "nullable": True},
            {"type": ["string", "null"], "enum": ["a", None]},
        ),
        ({"items": {"type": "integer", "nullable": True}}, {"items": {"type": ["integer", "null"]}}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
        ({"nullable": True, "maxLength": 3}, {"maxLength": 3}),
        ({"properties": {"nullable": {"type": "string"}}}, {"properties": {"nullable": {"type": "string"}}}),
    ],
)
def test_null_is_taken_where_openapi_says_so(schema: Any, left: Any) -> None:
    assert without_idle(schema, formats=False) == left
    assert without_idle(schema, formats=True) == left


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "nullable": True},
        {"type": "object", "allOf": [{"$ref": "#/$defs/a"}], "nullable": True},
        {"type": "string", "enum": ["a"], "nullable": True},
        {"type": "string", "const": "a", "nullable": True},
    ],
)
def test_elsewhere_nullable_is_a_remark_in_tools_and_stays_to_be_refused(schema: Any) -> None:
    assert without_idle(schema, formats=False) == schema
    assert without_idle(schema, formats=True) == {name: schema[name] for name in schema if name != "nullable"}


def test_options_of_llguidance_in_a_tool_say_nothing() -> None:
    schema = {"type": "string", "x-guidance": {"lenient": True}}
    assert without_idle(schema, formats=False) == schema
    assert without_idle(schema, formats=True) == {"type": "string"}


idle = st.fixed_dictionaries(
    {},
    optional={
        "format": st.sampled_from(["path", "int64", "date"]),
        "uniqueItems": st.booleans(),
        "propertyNames": st.sampled_from(
            [True, {"type": "string"}, {"type": "string", "format": "path"}, {"pattern": "^a"}, {}]
        ),
    },
)
values = st.recursive(
    st.sampled_from([None, True, 0, 1, "a", "format", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "format", "uniqueItems"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    by_name = st.dictionaries(
        st.sampled_from(["a", "format", "uniqueItems", "propertyNames"]), inner, max_size=2
    )
    form = st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", "string", ["object", "array"]]),
            "properties": by_name,
            "additionalProperties": inner,
            "items": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "enum": st.lists(values, min_size=1, max_size=2),
            "const": values,
        },
    )
    return st.builds(lambda one, other: one | other, form, idle)


@examples(300)
@given(schema=st.recursive(idle | st.booleans(), _around, max_leaves=6), value=values, formats=st.booleans())
def test_the_same_values_keep_to_it(schema: Any, value: Any, formats: bool) -> None:
    """`jsonschema` takes formats for the remarks that they are, unless it is told otherwise."""
    left = without_idle(schema, formats=formats)
    event(f"something is left out: {left != schema}")
    before, after = (jsonschema.Draft202012Validator(one).is_valid(value) for one in (schema, left))
    assert before == after
    assert without_idle(left, formats=formats) == left


def test_llguidance_takes_what_is_left() -> None:
    """It refuses each of the keywords, and so would any schema that holds one."""
    for name, value in IDLE.items():
        for schema, is_taken in (({name: value}, False), (without_idle({name: value}, formats=True), True)):
            source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
            assert (LLMatcher.validate_grammar(source) == "") == is_taken
