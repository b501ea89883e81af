"""Arguments of calls that models write without JSON's quotes: of which type they are, by their schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deployments.python_values import python_value_text
from deployments.tool_calls import DECODER, json_text

#: JSON schemas of functions' arguments, by name; None for a function without any.
Schemas = Mapping[str, Mapping[str, Any] | None]

# As models also write them whose chat template writes numbers and the like as Python does; Seed-OSS's does so
# with lists and objects.
_PYTHON = {"True": True, "False": False, "None": None}
_TYPES: list[tuple[type, tuple[str, ...]]] = [
    (bool, ("boolean",)),  # before `int`, of which Python takes it for one
    (int, ("integer", "number")),
    (float, ("number",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
]
_NESTED = frozenset({"array", "object"})
_DEEPEST = 16


def types_of(schema: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """The types that a schema of arguments names for one of them; none if it names none."""
    properties = (schema or {}).get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_named(found, schema or {}, 0))


def value_text(written: str, types: frozenset[str]) -> str:
    """An argument as JSON: what it says where that is JSON and it may be no string, else a string.

    Where it may be a string or something else, it is the latter only if it is of a type that is named.
    """
    if types == {"string"}:
        return json_text(written)
    try:
        value = DECODER.decode(written)
    except (ValueError, RecursionError):
        if types and types <= _NESTED:
            return python_value_text(written)
        if written.strip() not in _PYTHON:
            return json_text(written)
        value = _PYTHON[written.strip()]
    if "string" in types and not types.intersection(_types_of_value(value)):
        return json_text(written)
    return json_text(value)


def _named(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (one for one in named if isinstance(one, str))
    elif isinstance(schema.get("enum"), list):
        for value in schema["enum"]:
            yield from ("string",) if isinstance(value, str) else _types_of_value(value)
    elif isinstance(schema.get("const"), str):
        yield "string"
    for combined in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(combined), list):
            for one in schema[combined]:
                yield from _named(one, root, depth + 1)
    if isinstance(schema.get("$ref"), str):
        yield from _named(_referred(schema["$ref"], root), root, depth + 1)


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What `#/$defs/City` stands for."""
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _types_of_value(value: Any) -> tuple[str, ...]:
    return next((names for kind, names in _TYPES if isinstance(value, kind)), ())
