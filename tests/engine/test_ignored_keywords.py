"""What llguidance would pass over in a schema is refused, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.constraint import Constraint
from engine.grammar import GrammarError, Grammars, make_tokenizer
from engine.ignored_keywords import why_ignored
from tests.fakes.tiny_tokenizer import tokenizer

DRAFT_3 = "http://json-schema.org/draft-03/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"x-guidance": {}}, "x-guidance"),
        ({"properties": {"a": {"x-guidance": {"lenient": True}}}}, "x-guidance"),
        ({"nullable": True}, "nullable"),
        ({"items": {"$ref": "#/$defs/a", "nullable": True}, "$defs": {"a": {}}}, "nullable"),
        ({"$schema": DRAFT_3, "disallow": "string"}, "disallow"),
        ({"$schema": DRAFT_4, "const": 1}, "const"),
        ({"$schema": DRAFT_4, "items": {"propertyNames": {"maxLength": 1}}}, "propertyNames"),
        ({"$schema": DRAFT_7, "prefixItems": [{"const": 1}]}, "prefixItems"),
        ({"$schema": DRAFT_7.removesuffix("#"), "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"$schema": DRAFT_7, "properties": {"a": {"unevaluatedProperties": False}}}, "draft 7"),
        ({"$schema": DRAFT_2019, "prefixItems": []}, "draft 2019"),
    ],
)
def test_refused(schema: Any, says: str) -> None:
    reason = why_ignored(schema, takes_options=False)
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"properties": {"nullable": {"type": "string"}, "x-guidance": True}},
        {"enum": [{"nullable": True, "x-guidance": {}}], "default": {"nullable": True}},
        {"nullable": False},
        {"$schema": DRAFT_3, "const": 1},
        {"$schema": DRAFT_7, "const": 1, "definitions": {"prefixItems": {}}, "items": [{}]},
        {"$schema": DRAFT_2019, "dependentRequired": {}},
        {"$schema": DRAFT_2020, "prefixItems": []},
        {"prefixItems": [], "divisibleBy": 2},
        {"$schema": 7, "prefixItems": []},
    ],
)
def test_taken(schema: Any) -> None:
    assert why_ignored(schema, takes_options=False) is None


@pytest.mark.parametrize("name", ["lenient", "coerce_one_of"])
def test_a_grammar_may_set_options_but_none_by_which_keywords_are_ignored(name: str) -> None:
    schema = {"x-guidance": {"item_separator": ";"}}
    assert why_ignored(schema, takes_options=True) is None
    reason = why_ignored({"x-guidance": {name: True}}, takes_options=True)
    assert reason is not None
    assert name in reason


@pytest.mark.parametrize("kind", ["json_schema", "grammar"])
def test_a_lenient_schema_is_not_compiled(kind: str) -> None:
    """With the option, llguidance takes the list and lets any items through."""
    text = tokenizer().backend_tokenizer.to_str()
    end = int(tokenizer().eos_token_id)
    grammars = Grammars(lambda: make_tokenizer(text, [end], len(tokenizer())))
    schema = json.dumps({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}})
    source = schema if kind == "json_schema" else f"start: %json {schema}"
    with pytest.raises(GrammarError, match="x-guidance"):
        grammars.check(Constraint(kind="grammar" if kind == "grammar" else "json_schema", text=source))
