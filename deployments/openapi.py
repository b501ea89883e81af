"""Request bodies in /openapi.json: they are parsed by hand for the sake of their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel


def body_schema(
    request_type: type[BaseModel], neutral: Mapping[str, Sequence[Any]] | None = None
) -> dict[str, Any]:
    """What a route with that body adds to the document.

    Args:
        request_type: the body.
        neutral: values of fields that it does not have which are accepted all the same.
    """
    schema = _own_schema(request_type)
    fields = dict(schema["properties"])
    for name, values in sorted((neutral or {}).items()):
        fields.setdefault(name, {"enum": _distinct(values), "description": "Only what asks for nothing."})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema | {"properties": fields}}},
        }
    }


@cache
def _own_schema(request_type: type[BaseModel]) -> dict[str, Any]:
    """The body's schema without references, not to be changed: pydantic takes 10 ms for each."""
    schema = request_type.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    inlined: dict[str, Any] = _inline(schema, definitions)
    return inlined


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Without those that differ in Python's type only: JSON's 1 and 1.0 are the same, and true is not."""
    found: dict[tuple[bool, str], Any] = {}
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        found.setdefault((is_number, f"{value:g}" if is_number else repr(value)), value)
    return list(found.values())


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by what they refer to: FastAPI does not know these definitions."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}
