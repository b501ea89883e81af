"""Schemas whose answers would not keep to them are refused, and no others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.constraint import Constraint
from engine.exact_schema import why_not_exact
from engine.grammar import GrammarError, Grammars, make_tokenizer
from tests.fakes.tiny_tokenizer import tokenizer

SIZE = len(tokenizer())
END = int(tokenizer().eos_token_id)


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


@settings(max_examples=150, deadline=None)
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
