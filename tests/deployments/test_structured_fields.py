"""The fields of structured outputs: what reaches the cell, and what is refused before it does."""

from __future__ import annotations

import functools
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.api_service import ApiService
from deployments.openai_api import create_app
from engine.constraint import Constraint
from tests.fakes.cell_stand_in import CellStandIn

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPEN: dict[str, Any] = {
    "properties": {
        "type": {"type": "object", "additionalProperties": {"type": "object"}},
        "list": {"type": "array", "items": [{"type": "object", "default": {"type": "object"}}]},
        "by_pattern": {"type": "object", "patternProperties": {"a+": {"enum": [{"type": "object"}]}}},
        # Names that are keywords elsewhere.
        "default": {"type": "object"},
        "properties": {"type": "string"},
    }
}
CLOSED: dict[str, Any] = {
    "properties": {
        "type": {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": False},
        },
        "list": {
            "type": "array",
            "items": [{"type": "object", "default": {"type": "object"}, "additionalProperties": False}],
        },
        "by_pattern": {"type": "object", "patternProperties": {"a+": {"enum": [{"type": "object"}]}}},
        "default": {"type": "object", "additionalProperties": False},
        "properties": {"type": "string"},
    },
    "additionalProperties": False,
}
AS_JSON = Constraint(kind="json_schema", text=json.dumps(SCHEMA))
GUIDANCE = '%llguidance {}\nstart: "a"'

ACCEPTED: list[tuple[dict[str, Any], Constraint | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "json_object"}}, Constraint(kind="json_object")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        AS_JSON,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True}}},
        Constraint(kind="json_object"),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, AS_JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, AS_JSON),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Constraint(kind="json_schema", text=json.dumps(SCHEMA), compact=True),
    ),
    ({"structured_outputs": {"json": SCHEMA, "disable_fallback": False}}, AS_JSON),
    (
        {"structured_outputs": {"json": OPEN, "disable_additional_properties": True}},
        Constraint(kind="json_schema", text=json.dumps(CLOSED)),
    ),
    (
        {"structured_outputs": {"json": OPEN, "disable_additional_properties": False}},
        Constraint(kind="json_schema", text=json.dumps(OPEN)),
    ),
    ({"structured_outputs": {"json_object": True}}, Constraint(kind="json_object")),
    ({"structured_outputs": {"regex": "a+"}}, Constraint(kind="regex", text="a+")),
    ({"structured_outputs": {"choice": ["x", 'y"']}}, Constraint(kind="choice", text='["x", "y\\""]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint(kind="grammar", text='start: "a"')),
    ({"guided_json": SCHEMA}, AS_JSON),
    ({"guided_json": SCHEMA | {"uniqueItems": False, "propertyNames": {"type": "string"}}}, AS_JSON),
    (
        {"guided_json": {"type": "string", "nullable": True}},
        Constraint(kind="json_schema", text='{"type": ["string", "null"]}'),
    ),
    ({"guided_json": True}, Constraint(kind="json_schema", text="{}")),
    ({"structured_outputs": {"json": "true"}}, Constraint(kind="json_schema", text="{}")),
    ({"guided_regex": "[0-9]{3}"}, Constraint(kind="regex", text="[0-9]{3}")),
    ({"guided_choice": ["yes", "no"]}, Constraint(kind="choice", text='["yes", "no"]')),
    ({"guided_grammar": 'root ::= "a" | "b"'}, Constraint(kind="grammar", text='root ::= "a" | "b"')),
    # As Guidance's client of vLLM sends it.
    (
        {
            "structured_outputs": {"grammar": GUIDANCE},
            "guided_decoding_backend": "guidance",
            "guided_grammar": GUIDANCE,
        },
        Constraint(kind="grammar", text=GUIDANCE),
    ),
    ({"guided_decoding_backend": "xgrammar"}, None),
    # SGLang's names, as its clients in Outlines and Guidance send them.
    ({"json_schema": json.dumps(SCHEMA)}, AS_JSON),
    ({"json_schema": SCHEMA}, AS_JSON),
    ({"regex": "[0-9]{3}", "ebnf": None}, Constraint(kind="regex", text="[0-9]{3}")),
    ({"ebnf": 'root ::= "a" | "b"'}, Constraint(kind="grammar", text='root ::= "a" | "b"')),
]


@pytest.mark.api(
    "completions",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "guided_decoding_backend",
)
@pytest.mark.api(
    "chat.completions",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "guided_decoding_backend",
)
@pytest.mark.parametrize(("fields", "expected"), ACCEPTED)
async def test_every_form_reaches_the_cell(
    http: httpx.AsyncClient, cell: CellStandIn, fields: dict[str, Any], expected: Constraint | None
) -> None:
    for path, prompt in (
        (COMPLETIONS, {"prompt": "hi"}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        response = await http.post(path, json={**prompt, **fields, "n": 2, "max_tokens": 8})
        assert response.status_code == 200, response.text
        assert [one.sampling.constraint for one in cell.submissions[-2:]] == [expected, expected]


DEEP = {"json": '{"items": ' * 700 + "{}" + "}" * 700, "disable_additional_properties": True}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": DEEP}, "structured_outputs.json", "nested"),
    ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
    ({"guided_json": {"not": {}}}, "guided_json", "not"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"type": "string", "format": "path"}}, "guided_json", "Unknown format: path"),
    ({"guided_json": {"$ref": "#/$defs/a", "nullable": True}}, "guided_json", "nullable"),
    ({"guided_json": SCHEMA | {"x-guidance": {"whitespace_flexible": True}}}, "guided_json", "x-guidance"),
    ({"guided_json": {"oneOf": [SCHEMA, {"type": "object"}]}}, "guided_json", "give `anyOf`"),
    ({"guided_json": '{"type": '}, "guided_json", "JSON"),
    ({"guided_json": False}, "guided_json", "no answer"),
    ({"guided_json": "false"}, "guided_json", "no answer"),
    ({"guided_json": '{"maximum": NaN}'}, "guided_json", "finite"),
    ({"guided_json": '{"maximum": 1e999}'}, "guided_json", "finite"),
    ({"guided_json": [1]}, "guided_json", "JSON schema"),
    ({"guided_json": {"enum": [1152921504606846977]}}, "guided_json", "another number"),
    ({"guided_json": {"type": "object", "minProperties": 2}}, "guided_json", "minProperties"),
    ({"guided_regex": "b{300000}"}, "guided_regex", "too many"),
    ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}}, "guided_json", "minimum"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", "nowhere"),
    ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_regex": "[^\\s\\S]"}, "guided_regex", "can continue"),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "characters"),
    ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
    ({"guided_grammar": "root ::= missing"}, "guided_grammar", "missing"),
    ({"guided_choice": []}, "guided_choice", "1 item"),
    ({"guided_choice": ["a", 1]}, "guided_choice.1", "string"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "both"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "Unknown"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    *(
        (
            {"response_format": {"type": kind, "json_schema": {"name": "x", "schema": {"type": "array"}}}},
            "response_format.json_schema",
            "type json_schema only",
        )
        for kind in ("json_object", "text")
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}},
        "response_format.json_schema",
        "Invalid type",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "both"),
    ({"guided_regex": "a", "regex": "b"}, "regex", "both"),
    (
        {"structured_outputs": {"grammar": 'start: "a"'}, "guided_grammar": 'start: "b"'},
        "guided_grammar",
        "both",
    ),
    ({"regex": "a("}, "regex", "unclosed group"),
    ({"ebnf": "root ::= missing"}, "ebnf", "missing"),
    ({"json_schema": {"type": "strin"}}, "json_schema", "strin"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "combined"),
    ({"guided_regex": "a", "allowed_token_ids": [7]}, "allowed_token_ids", "combined"),
    ({"guided_regex": "a", "bad_words": ["x"]}, "bad_words", "combined"),
]


@functools.cache
def roomy_app(service: ApiService) -> FastAPI:
    """One for all tests, whose service is one object, too."""
    return create_app(service, max_body_bytes=200_000)


@pytest.mark.api(
    "completions",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
)
@pytest.mark.api(
    "chat.completions",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
)
@pytest.mark.parametrize(("fields", "param", "says"), REFUSED)
async def test_what_cannot_be_followed_is_refused_by_name(
    service: ApiService, cell: CellStandIn, fields: dict[str, Any], param: str, says: str
) -> None:
    transport = httpx.ASGITransport(app=roomy_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        response = await http.post(COMPLETIONS, json={"prompt": "hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"], error["message"]
    assert "state>" not in error["message"]
    assert not cell.submissions


async def test_definitions_nested_by_the_thousand_harm_nobody(http: httpx.AsyncClient) -> None:
    """llguidance's compiler is recursive; on a usual stack this would end the process."""
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(1300))
    grammar = f'start: r0\n{chain}\nr1300: "a"'
    response = await http.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 4, "guided_grammar": grammar})
    assert response.status_code in (200, 400, 413), response.text
    assert (await http.post(COMPLETIONS, json={"prompt": "hi", "guided_regex": "a"})).status_code == 200
