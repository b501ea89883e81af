"""Keywords of JSON schemas that constrain nothing, and that llguidance would refuse; and `nullable`."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from engine.schema_parts import BY_NAME

# Keywords whose values are schemas, or lists of them; `items` and others may be either.
_SCHEMAS = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "items", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "else", "if", "not", "then"),
        *("allOf", "anyOf", "oneOf", "prefixItems"),
    }
)
_SCHEMAS_BY_NAME = BY_NAME | {"dependencies"}  # of draft 7, whose values may be lists of names instead
# Beside `type`, what a schema of all strings may say.
_ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "examples", "title"})
# Beside a `type`, what may rule null out that it lets through.
_OTHER_RULES = frozenset({"$ref", "allOf", "anyOf", "const", "oneOf"})
# No name of a format has more characters; what is longer is not worth remembering.
_LONGEST = 64


def without_idle(schema: Any, *, formats: bool) -> Any:
    """The schema without them, which is left as it is; null is a `type` where `nullable` says so.

    What stands where JSON Schema has no schema is not touched: properties of these names, values of `enum`,
    keywords that nobody knows. By a list of what is left, since it may be nested deeper than Python's stack.

    Args:
        schema: JSON.
        formats: whether a `format` that llguidance does not know is one of them. By JSON Schema it is a
            remark; but who asks for an answer of that format may rely on it. So are `nullable` where OpenAPI
            gives it no meaning, and llguidance's own options.
    """
    made: list[Any] = [schema]
    left: list[tuple[Any, Any]] = [(made, 0)]  # what holds a schema, which is ours to change, and where
    while left:
        holder, place = left.pop()
        part = holder[place]
        if isinstance(part, list):
            holder[place] = part = list(part)
            left += [(part, number) for number in range(len(part))]
        elif isinstance(part, dict):
            part = _with_null(part)
            kept = {name: value for name, value in part.items() if not _is_idle(name, value, formats)}
            holder[place] = kept
            for name, value in kept.items():
                if name in _SCHEMAS:
                    left.append((kept, name))
                elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
                    kept[name] = by_name = dict(value)
                    left += [(by_name, one) for one in by_name]
    return made[0]


def _is_idle(keyword: str, value: Any, formats: bool) -> bool:
    match keyword:
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return _takes_all_strings(value, formats)
        case "format":
            return formats and isinstance(value, str) and (len(value) > _LONGEST or not _is_known(value))
        case "nullable":
            return value is False or formats
        case "x-guidance":
            return formats
    return False


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """As OpenAPI 3.0 has it, a `type` with `nullable` takes null, too, unless others rule it out."""
    if schema.get("nullable") is not True or _OTHER_RULES & schema.keys():
        return schema
    values = schema.get("enum")
    if isinstance(values, list) and None not in values:
        return schema
    left = {name: value for name, value in schema.items() if name != "nullable"}
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        left["type"] = kinds if "null" in kinds else [*kinds, "null"]
    return left


def _takes_all_strings(schema: Any, formats: bool) -> bool:
    """As names of properties are strings, it says nothing; zod 4 writes one for each record."""
    if not isinstance(schema, dict):
        return schema is True
    rest = schema.keys() - _ANNOTATIONS
    if "format" in rest and _is_idle("format", schema["format"], formats):
        rest -= {"format"}
    return not rest or (rest == {"type"} and schema["type"] in ("string", ["string"]))


@lru_cache(256)
def _is_known(name: str) -> bool:
    """Whether llguidance holds strings to a format."""
    schema = {"type": "string", "format": name}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
