"""What would be compiled for ever, since many expressions meet in one text, is refused, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.constraint import Constraint
from engine.grammar import GrammarError, Grammars, make_tokenizer
from engine.intersections import MOST_TOGETHER, why_intersects_too_many, why_matches_too_many
from tests.fakes.tiny_tokenizer import tokenizer

MANY = MOST_TOGETHER + 1


def text(number: int) -> str:
    return f".*a.{{{number}}}b.*"


def string(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": text(number)}


def chain(last: int) -> dict[str, Any]:
    return {
        str(n): {**string(n), **({} if n == last else {"$ref": f"#/$defs/{n + 1}"})} for n in range(last + 1)
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [string(number) for number in range(MANY)]},
        {"allOf": [{"anyOf": [string(number), {"type": "null"}]} for number in range(MANY)]},
        {"allOf": [{"properties": {"a": string(number)}} for number in range(MANY)]},
        {"allOf": [{"items": {"properties": {"a": string(number)}}} for number in range(MANY)]},
        {"allOf": [{"prefixItems": [{}, string(number)]} for number in range(MANY)]},
        {"allOf": [{"additionalProperties": string(number)} for number in range(MANY)]},
        {"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": chain(MANY)},
        {"format": "email", "allOf": [string(number) for number in range(MOST_TOGETHER)]},
    ],
)
def test_schemas_refused(schema: Any) -> None:
    assert "one string" in str(why_matches_too_many(schema))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"allOf": [string(number) for number in range(MOST_TOGETHER)]},
        {"allOf": [string(1)] * MANY},
        {"anyOf": [string(number) for number in range(MANY)]},
        {"oneOf": [{"properties": {"a": string(number)}} for number in range(MANY)]},
        {"properties": {f"p{number}": string(number) for number in range(MANY)}},
        {"allOf": [{"properties": {f"p{number}": string(number)}} for number in range(MANY)]},
        {"prefixItems": [string(number) for number in range(MANY)]},
        {"allOf": [{"$ref": "#"}], "$defs": {str(number): string(number) for number in range(MANY)}},
        {"allOf": [{"$ref": "#/enum/0"}, 5], "anyOf": 5, "enum": [string(number) for number in range(MANY)]},
    ],
)
def test_schemas_taken(schema: Any) -> None:
    assert why_matches_too_many(schema) is None


def test_deep_schemas() -> None:
    """A chain of thousands is walked, and schemas that circle are walked once."""
    links = {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}, {"$ref": "#/$defs/0"}]} for n in range(3000)}
    wide = {f"p{number}": string(number) for number in range(MANY)}
    assert why_matches_too_many({"$defs": links, "properties": wide}) is None


EXPRESSIONS = [f"/{text(number)}/" for number in range(MANY)]
JOINED = " & ".join(EXPRESSIONS)


@pytest.mark.parametrize(
    "lark",
    [
        f"start: A\nA: {JOINED}",
        "start: A\n?A:\n " + "\n & ".join(EXPRESSIONS),
        "start: T0\n"
        + "\n".join(f"T{n}: {one} & T{n + 1}" for n, one in enumerate(EXPRESSIONS))
        + f'\nT{MANY}: "x"',
    ],
)
def test_grammars_refused(lark: str) -> None:
    assert "intersects more than" in str(why_intersects_too_many(lark))


@pytest.mark.parametrize(
    "lark",
    [
        f"start: A\nA: {' & '.join(EXPRESSIONS[1:])}",
        f'start: "{JOINED}" /[&]{{99}}/ // {JOINED}',
        f"start: A{' A'.join(map(str, range(MANY)))}\n"
        + "\n".join(f"A{number}: /[a-z]+/ & ~/if|else/" for number in range(MANY)),
    ],
)
def test_grammars_taken(lark: str) -> None:
    assert why_intersects_too_many(lark) is None


def test_a_compiler_of_others_is_not_kept() -> None:
    """Forty took all memory, for minutes, and no other constraint of the process was compiled meanwhile."""
    core = tokenizer()
    ends = [int(core.eos_token_id)]
    grammars = Grammars(lambda: make_tokenizer(core.backend_tokenizer.to_str(), ends, len(core)))
    patterns = [string(number) for number in range(40)]
    for constraint in (
        Constraint(kind="grammar", text="start: A\nA: " + " & ".join(f"/{text(n)}/" for n in range(40))),
        Constraint(kind="json_schema", text=json.dumps({"allOf": patterns})),
        Constraint(kind="grammar", text=f"start: %json {json.dumps({'allOf': patterns})}"),
    ):
        assert isinstance(grammars.prepare(constraint).exception(timeout=20), GrammarError)
