"""Masks along the paths of a tree are those of answers that go there at once."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from engine.constraint import Constraint
from engine.matcher import Matcher
from tests.verifier.grammars import END, PIECES, make_grammars

GRAMMARS = make_grammars()
PLACE = {piece: number for number, piece in enumerate(dict.fromkeys(PIECES), 2)}
LEAVES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 0, "maximum": 120},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string", "maxLength": 3},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
]


def tokens(*pieces: str) -> list[int]:
    return [PLACE[piece] for piece in pieces]


def object_of(properties: dict[str, Any]) -> Constraint:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return Constraint(kind="json_schema", text=json.dumps(schema))


def test_a_property_is_not_taken_for_another_of_as_many_lexemes() -> None:
    """llguidance's last mask was that behind `{"xy":`, which it gave behind `{"a":`, too."""
    constraint = object_of({"a": LEAVES[0], "xy": LEAVES[1]})
    matcher = Matcher(GRAMMARS, constraint, tokens('{"'))
    matcher.allowed()
    for depth, token in enumerate(tokens("xy", '"', ":"), 1):
        matcher.enter(token, depth)
        matcher.allowed()
    matcher.leave()
    matcher.advance(tokens("a"))
    for depth, token in enumerate(tokens('"', ":"), 1):
        matcher.enter(token, depth)
        mask = matcher.allowed()
    expected = Matcher(GRAMMARS, constraint, tokens('{"', "a", '"', ":")).allowed()
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("seed", range(8))
def test_random_trees(seed: int) -> None:
    """Objects whose properties differ in what they hold, and walks that turn back at any place."""
    rng = random.Random(seed)
    keys = rng.sample(["a", "ab", "xy", "b", "abc", "x"], 3)
    constraint = object_of({key: rng.choice(LEAVES) for key in keys})
    for _ in range(6):
        output: list[int] = []
        matcher, path = Matcher(GRAMMARS, constraint), list[int]()
        for _ in range(25):
            mask = matcher.allowed()
            expected = Matcher(GRAMMARS, constraint, [*output, *path]).allowed()
            np.testing.assert_array_equal(mask, expected)
            if rng.random() < 0.2:  # a step ends: some of the path is committed
                kept = path[: rng.randint(0, len(path))]
                matcher.leave()
                matcher.advance(kept)
                output, path = output + kept, []
                continue
            if path and rng.random() < 0.35:
                path = path[: rng.randint(0, len(path) - 1)]
                expected = Matcher(GRAMMARS, constraint, [*output, *path]).allowed()
            allowed = [token for token in PLACE.values() if expected[token // 32] >> token % 32 & 1]
            if not allowed:
                break
            path.append(rng.choice(allowed))
            matcher.enter(path[-1], len(path))
    assert END not in PLACE.values()
