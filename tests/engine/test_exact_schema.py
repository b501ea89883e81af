"""Schemas whose answers would not keep to them are refused, and no others."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.constraint import Constraint
from engine.exact_schema import why_not_exact
from engine.grammar import GrammarError, Grammars, make_tokenizer
from engine.mask_bits import holds
from engine.thoughtful_grammar import matcher_of
from tests.examples import examples
from tests.fakes.tiny_tokenizer import ids, tokenizer

SIZE = len(tokenizer())
END = int(tokenizer().eos_token_id)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    text = tokenizer().backend_tokenizer.to_str()
    return Grammars(lambda: make_tokenizer(text, [END], SIZE), vocab_size=SIZE)


def nothing_kept(number: float) -> bool:
    return False


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"const": 2**53 + 1}, "const"),
        ({"anyOf": [{"type": "null"}, {"enum": ["a", {"b": [1, -(2**60) - 1]}]}]}, "enum"),
        ({"properties": {"a": {"const": 123456789.12345679}}}, "123456789.12345679"),
        ({"items": {"type": "integer", "minimum": 2**53 + 2}}, "minimum"),
        ({"$defs": {"a": {"exclusiveMaximum": -1e300}}}, "exclusiveMaximum"),
        ({"minProperties": 2}, "minProperties"),
        ({"patternProperties": {"a": {}}, "additionalProperties": False, "minProperties": 2}, "twice"),
        ({"required": ["a"], "minProperties": 3}, "minProperties"),
        ({"items": {"prefixItems": [{"const": 1}], "additionalItems": False}}, "additionalItems"),
        ({"prefixItems": [{"const": 1}], "items": [{"const": 2}]}, "older drafts"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "let 0 through"),
        ({"type": ["null", "number"], "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "let 1 through"),
        ({"minimum": -2.5, "exclusiveMaximum": -2.0}, "let -2.0 through"),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "let 0 through"),
        ({"pattern": "^[^a~~b]$"}, "'~~' in `[^a~~b]`"),
        ({"items": {"pattern": r"\[[^\[&&\]]*\]"}}, "'&&' in"),
        ({"patternProperties": {"x[^+--]": {}}}, "'--' in"),
        ({"pattern": "[^[a]]"}, "'[' in"),
    ],
)
def test_refused(schema: Any, says: str) -> None:
    reason = why_not_exact(schema, nothing_kept)
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"enum": [1, 2.5, True, None, "9007199254740993", 2**53]},
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        # Names that are keywords elsewhere.
        {"properties": {"minimum": {"type": "string"}, "enum": {"type": "integer"}}, "required": ["enum"]},
        {"default": 2**70, "examples": [2**70]},
        {"required": ["a"], "minProperties": 2},
        {"additionalProperties": False, "properties": {"a": {}, "b": {}}, "minProperties": 2},
        {"maxProperties": 2},
        {"prefixItems": [{"const": 1}], "items": False},
        {"items": [{"const": 1}], "additionalItems": False},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.75},
        {"type": "number", "minimum": 0, "maximum": 0.5},
        {"type": "number", "exclusiveMinimum": -1, "maximum": -0.5},
        {"pattern": r"a&&b--[^\~\~]\[a--b\][a-z_-][\[\]]~~[\\]--"},
        {"properties": {"pattern": {"const": "[a&&b]"}, "patternProperties": {"enum": ["[--]"]}}},
    ],
)
def test_taken(schema: Any) -> None:
    assert why_not_exact(schema, nothing_kept) is None


def test_nested_deeply() -> None:
    schema: dict[str, Any] = {"const": 2**60 + 1}
    for _ in range(5000):
        schema = {"items": schema}
    assert why_not_exact(schema, nothing_kept) is not None


numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1e12, 1e12),
)


@examples(150)
@given(number=numbers)
def test_a_number_that_is_taken_is_the_one_written(number: float) -> None:
    """By the answer that a grammar of nothing else leaves."""
    text = tokenizer().backend_tokenizer.to_str()
    grammars = Grammars(lambda: make_tokenizer(text, [END], SIZE), vocab_size=SIZE)
    constraint = Constraint(kind="json_schema", text=json.dumps({"const": number}))
    error = grammars.prepare(constraint).exception()
    if error is None:
        compiled = grammars.prepare(constraint).result().deep_copy()
        assert json.loads(compiled.compute_ff_bytes()) == number
    else:
        assert isinstance(error, GrammarError)
        assert "another number" in str(error)


@pytest.mark.parametrize("least", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("most", ["maximum", "exclusiveMaximum"])
def test_no_number_outside_of_bounds_that_are_taken_is_written(
    grammars: Grammars, least: str, most: str
) -> None:
    numbers = (-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2)
    num_written = 0
    for low, high in itertools.combinations(numbers, 2):
        schema = {"type": "number", least: low, most: high}
        constraint = Constraint(kind="json_schema", text=json.dumps(schema))
        if grammars.prepare(constraint).exception() is not None:
            continue
        for number in numbers:
            matcher, is_written = matcher_of(grammars, constraint), True
            for token in [*ids(str(number)), END]:
                is_written = is_written and holds(matcher.allowed(), token)
                if is_written:
                    matcher.advance([token])
            if is_written:
                jsonschema.validate(number, schema)
                num_written += 1
    assert num_written > 40


def test_escaped_as_a_refused_pattern_says_it_is_followed(grammars: Grammars) -> None:
    for pattern, escaped in (("[^a~~b]", r"[^a\~\~b]"), ("[^a&&b]", r"[^a\&\&b]"), ("[^+--]", r"[^+\-\-]")):
        before, after = (
            grammars.prepare(
                Constraint(kind="json_schema", text=json.dumps({"type": "string", "pattern": f"^{one}$"}))
            )
            for one in (pattern, escaped)
        )
        assert isinstance(before.exception(), GrammarError)
        assert after.exception() is None
