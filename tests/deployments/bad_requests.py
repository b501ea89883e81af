"""Bad requests by the hundred, made from the schemas: each has one thing wrong, and it is known where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from scripts.compatibility_table import ENDPOINTS

#: A valid body of each endpoint.
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6]},
}

_BY_TYPE: dict[str, list[Any]] = {
    "null": [None],
    "boolean": [True, False],
    "integer": [7, -1, 10**30],
    "number": [1.5, -1e99],
    "string": ["x", "", "\x00"],
    "array": [[[]], [None, {}]],
    "object": [{"a": 1}, {"": {"": []}}],
}

#: Deeper than any parser should follow, and deep enough to matter.
_DEPTHS = (100, 5000)


@dataclass(frozen=True)
class BadRequest:
    """A body and the field that the answer must name; no field if it is not an object of JSON at all.

    Unless it is `usual`, it is sent in thorough runs alone.
    """

    path: str
    body: bytes
    field: str | None
    usual: bool = True


def bad_requests() -> Iterator[BadRequest]:
    """All of them, in a fixed order."""
    for endpoint in ENDPOINTS:
        path, base = endpoint.path, BASES[endpoint.path]
        schema = endpoint.schema.model_json_schema()
        definitions = schema.get("$defs", {})
        for name, property_ in schema["properties"].items():
            branches = list(_branches(property_, definitions))
            for index, value in enumerate(_wrong_types(branches)):
                # All fields are refused a type by the same code: a few of them are enough.
                yield replace(_with(path, base, name, value), usual=index % 4 == 0)
            for value in _out_of_range(branches):
                yield _with(path, base, name, value)
            if name in schema.get("required", ()):
                yield BadRequest(path, _json({k: v for k, v in base.items() if k != name}), name)
                yield _with(path, base, name, None)
            # A key that differs by a letter.
            yield _with(path, base, name + "_", 1)
        for name in sorted(endpoint.neutral - endpoint.fields().keys()):
            yield _with(path, base, name, {"asks": "something"})
        yield from _not_objects(path, base)
        for depth in _DEPTHS:
            nested = b"[" * depth + b"]" * depth
            body = _json(base)[:-1] + b', "extra": ' + nested + b"}"
            yield BadRequest(path, body, "extra" if depth < 200 else None)


def _with(path: str, base: dict[str, Any], name: str, value: Any) -> BadRequest:
    return BadRequest(path, _json(base | {name: value}), name)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _branches(schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The alternatives of a property, without references."""
    if "$ref" in schema:
        yield from _branches(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    elif "anyOf" in schema:
        for branch in schema["anyOf"]:
            yield from _branches(branch, definitions)
    else:
        yield schema


def _wrong_types(branches: list[dict[str, Any]]) -> Iterator[Any]:
    allowed: set[str] = set()
    for branch in branches:
        if "type" not in branch and "enum" not in branch and "const" not in branch:
            return  # anything goes
        allowed.add(branch.get("type", "string"))
    if "number" in allowed:
        allowed.add("integer")
    for kind, values in _BY_TYPE.items():
        if kind not in allowed and kind != "null":
            yield from values


def _out_of_range(branches: list[dict[str, Any]]) -> Iterator[Any]:
    for branch in branches:
        if "minimum" in branch:
            yield branch["minimum"] - 1
        if "exclusiveMinimum" in branch:
            yield branch["exclusiveMinimum"]
        if "maximum" in branch:
            yield branch["maximum"] + 1
        if "exclusiveMaximum" in branch:
            yield branch["exclusiveMaximum"]
        if branch.get("type") == "integer":
            yield from (-(10**30), 10**30)
        if branch.get("minItems"):
            yield []
        if branch.get("maxItems", 10**9) <= 200:
            item = "x" if "string" in json.dumps(branch["items"]) else 5
            yield [item] * (branch["maxItems"] + 1)
        if branch.get("maxLength", 10**9) <= 4096:
            yield "x" * (branch["maxLength"] + 1)
        if "pattern" in branch:
            yield "no \x01 such name"
        if "enum" in branch:
            yield "nonsense"


def _not_objects(path: str, base: dict[str, Any]) -> Iterator[BadRequest]:
    body = _json(base)
    for wrong in (
        b"",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"{",
        b"not json",
        b"a=1&b=2",
        b"\xff\xfe\x00",
        body[:-1],
        body[: len(body) // 2],
        body + b"}",
        body + body,
        body.replace(b'"hi"', b'"\xc3("'),
        body.replace(b'"hi"', b'"\\ud800"'),
        body.replace(b'"hi"', b"NaN"),
        body.replace(b"4", b"Infinity"),
        body.replace(b'"', b"'"),
        b"\x1f\x8b\x08\x00" + body,
        b"<?xml version='1.0'?><prompt>hi</prompt>",
    ):
        if wrong != body:
            yield BadRequest(path, wrong, None)
