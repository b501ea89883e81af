"""A key of an answer is the one that its reader finds, however it could be spelled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from engine.constraint import Constraint
from engine.grammar import GrammarError, Grammars
from engine.grammar_source import json_rule


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """Over bytes, so that every spelling is some tokens."""
    return Grammars(lambda: LLTokenizer("byte"))


def takes(grammars: Grammars, constraint: Constraint, answer: str) -> bool:
    """Whether it is a complete answer."""
    matcher = grammars.prepare(constraint).result().deep_copy()
    tokens = [*answer.encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
BY_PATTERN: dict[str, Any] = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema", [NAMED, BY_PATTERN, {"items": NAMED}, {"allOf": [NAMED, {"type": "object"}]}]
)
def test_no_key_hides_behind_codes(grammars: Grammars, schema: Any) -> None:
    """`{"\\u0061": "x"}` is read as `{"a": "x"}`."""
    constraint = Constraint(kind="json_schema", text=json.dumps(schema))
    around = "[{}]" if "items" in schema else "{}"
    for answer, is_taken in (
        ('{"a": 1}', True),
        ('{"a": "x"}', False),
        (r'{"\u0061": "x"}', False),
        (r'{"a": 1, "\u0061": "x"}', False),
        (r'{"b\n\"\\": "\t"}', True),
    ):
        assert takes(grammars, constraint, around.format(answer)) == is_taken, answer


@pytest.mark.parametrize("schema", [{"type": "object"}, NAMED | {"additionalProperties": False}])
def test_codes_are_taken_where_nothing_could_hide(grammars: Grammars, schema: Any) -> None:
    constraint = Constraint(
        kind="json_schema", text=json.dumps({"prefixItems": [schema, {"type": "string"}]})
    )
    assert takes(grammars, constraint, r'[{"a": 1}, "\u0001"]')


def test_text_that_needs_codes_is_refused_beside_such_keys(grammars: Grammars) -> None:
    for name, value in (("const", "\x1b[0m"), ("enum", ["a", {"b": ["\x7f"]}])):
        schema = NAMED | {"properties": {"a": {name: value}}}
        with pytest.raises(GrammarError, match="additionalProperties"):
            grammars.check(Constraint(kind="json_schema", text=json.dumps(schema)))
        grammars.check(
            Constraint(kind="json_schema", text=json.dumps(schema | {"additionalProperties": False}))
        )


def test_tools_beside_a_format(grammars: Grammars) -> None:
    """Whose grammar is in Lark, with the schemas in it."""
    constraint = Constraint(kind="grammar", text=f"start: {json_rule(json.dumps(NAMED))}")
    assert takes(grammars, constraint, '{"a": 1}')
    assert not takes(grammars, constraint, r'{"\u0061": "x"}')
