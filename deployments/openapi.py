"""Request bodies in /openapi.json: they are parsed by hand for the sake of their errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def body_schema(request_type: type[BaseModel]) -> dict[str, Any]:
    """What a route with that body adds to the document."""
    schema = request_type.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inline(schema, definitions)}},
        }
    }


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by what they refer to: FastAPI does not know these definitions."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}
