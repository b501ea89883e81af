"""Schemas that would be compiled for seconds or for ever are refused, wherever they stand, and no others."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engine.constraint import Constraint
from engine.grammar import GrammarError, Grammars, make_tokenizer
from engine.mask_bits import holds
from engine.matcher import Matcher
from engine.schema_cost import MOST_OPTIONAL, why_too_dear
from engine.thoughtful_grammar import matcher_of
from tests.fakes.tiny_tokenizer import tokenizer

SIZE = len(tokenizer())
END = int(tokenizer().eos_token_id)
BIG: dict[str, Any] = {"type": "integer", "multipleOf": 9973 * 9967}
TOGETHER: list[dict[str, Any]] = [{"multipleOf": 9973}, {"multipleOf": 9967}]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    text = tokenizer().backend_tokenizer.to_str()
    return Grammars(lambda: make_tokenizer(text, [END], SIZE), vocab_size=SIZE)


@pytest.mark.parametrize(
    "schema",
    [
        BIG,
        {"type": "number", "multipleOf": 999_983.0},
        {"type": "integer", "multipleOf": 99.9983},
        {"multipleOf": 123_400_000},
        {"properties": {"a": {"items": BIG}}},
        {"type": "integer", "allOf": TOGETHER},
        {"type": "integer", "allOf": [TOGETHER[0], {"anyOf": [{"maximum": 3}, TOGETHER[1]]}]},
        {"$defs": {"a/b": [TOGETHER[0]]}, "properties": {"x": {"$ref": "#/$defs/a~1b/0", **TOGETHER[1]}}},
        {"items": {"$id": "x", "$defs": {"a": TOGETHER[0]}, "not": {"$ref": "#/$defs/a", **TOGETHER[1]}}},
    ],
)
def test_refused(schema: Any) -> None:
    reason = why_too_dear(schema)
    assert reason is not None
    assert "multipleOf" in reason


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"multipleOf": 0.01},
        {"multipleOf": 86_400},
        {"multipleOf": 10_000_000},
        {"multipleOf": 3_600_000},
        {"properties": {"a": TOGETHER[0], "b": TOGETHER[1], "multipleOf": {"const": 999_983}}},
        {"$ref": "#", "items": {"$ref": "elsewhere#/a"}, "allOf": 5, "multipleOf": "x"},
        {"enum": [{"multipleOf": 999_983}]},
    ],
)
def test_taken(schema: Any) -> None:
    assert why_too_dear(schema) is None


def test_what_is_taken_is_compiled_in_time(grammars: Grammars) -> None:
    for number in (99_991, 10_000_000, 0.125):
        schema = {"type": "number", "multipleOf": number}
        grammars.prepare(Constraint(kind="json_schema", text=json.dumps(schema))).result(timeout=20)


def wide(num_optional: int, num_required: int = 0) -> dict[str, Any]:
    names = [f"p{number}" for number in range(num_optional + num_required)]
    properties = {name: {"type": "integer"} for name in names}
    required = names[num_optional:]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def test_answers_of_wide_objects_are_followed_to_their_end(grammars: Grammars) -> None:
    """With 500 properties that may be left out, llguidance would give up after the opening brace."""
    for schema, last in ((wide(MOST_OPTIONAL), MOST_OPTIONAL - 1), (wide(0, 1000), None)):
        constraint = Constraint(kind="json_schema", text=json.dumps(schema))
        grammars.prepare(constraint).result()
        matcher = Matcher(grammars, constraint)
        names = range(1000) if last is None else (0, 1, last)
        text = json.dumps({f"p{number}": 7 for number in names})
        for token in [*tokenizer().encode(text, add_special_tokens=False), END]:
            assert holds(matcher.allowed(), token)
            matcher.advance([token])


def test_wider_ones_are_refused() -> None:
    assert why_too_dear(wide(MOST_OPTIONAL, 500)) is None
    for schema in (
        wide(MOST_OPTIONAL + 1),
        {"anyOf": [{"type": "null"}, {"items": wide(MOST_OPTIONAL + 1)}]},
    ):
        assert "1001 may be left out" in str(why_too_dear(schema))


def test_schemas_in_grammars_are_looked_at_too(grammars: Grammars) -> None:
    for schema, says in ((BIG, "too long"), ({"enum": [2**60 + 1]}, "another number")):
        text = f'start: "x" rest\nrest: %json {json.dumps(schema, indent=1)}\n| "%json {{"'
        compiling = grammars.prepare(Constraint(kind="grammar", text=text))
        assert says in str(compiling.exception(timeout=20))
        assert isinstance(compiling.exception(), GrammarError)
    grammars.check(Constraint(kind="grammar", text='start: "%json {" | %json {"multipleOf": 8}'))


def test_the_first_mask_is_computed_by_the_compiler_and_no_answer(grammars: Grammars) -> None:
    """In the step of a target everybody would wait for it."""

    def options(number: int) -> dict[str, Any]:
        return {"anyOf": [{"properties": {f"{number}{name}": {"type": "integer"}}} for name in "abc"]}

    schema = {"allOf": [options(number) for number in range(5)]}
    constraint = Constraint(kind="json_schema", text=json.dumps(schema))
    began = time.perf_counter()
    grammars.check(constraint)
    compiled = time.perf_counter()
    matcher_of(grammars, constraint).allowed()
    assert time.perf_counter() - compiled < (compiled - began) / 10
