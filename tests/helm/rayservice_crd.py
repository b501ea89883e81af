"""The CRD's schema as the API server applies it, unknown fields refused."""

from __future__ import annotations

from typing import Any

import jsonschema


def closed(schema: Any) -> Any:
    """The schema without room for unknown fields; integers that may be strings are not typed by it."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(part) for key, part in schema.items()}
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    fields = found.get("properties")
    is_open = found.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in found
    if isinstance(fields, dict) and found.get("type") == "object" and not is_open:
        found["additionalProperties"] = False
    return found


def completed(value: Any, schema: Any) -> Any:
    """What the API server validates: defaults are in, nulls are out."""
    if isinstance(value, list):
        return [completed(part, schema.get("items", {})) for part in value]
    if not isinstance(value, dict):
        return value
    fields = schema.get("properties", {})
    defaults = {
        name: part["default"] for name, part in fields.items() if "default" in part and name not in value
    }
    present = {name: part for name, part in value.items() if part is not None}
    return defaults | {name: completed(part, fields.get(name, {})) for name, part in present.items()}


def check_crd(service: Any, crd: Any) -> None:
    jsonschema.Draft7Validator(closed(crd)).validate(completed(service, crd))
