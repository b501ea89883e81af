"""What validation found wrong with a value, in words for who wrote it: pydantic's are about Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TYPES = {
    "bool": "true or false",
    "dict": "fields with values, as in `{field: value}`",
    "dictionary": "fields with values, as in `{field: value}`",
    "float": "a number",
    "int": "an integer",
    "list": "a list, as in `[value, value]`",
    "model": "fields with values, as in `{field: value}`",
    "model_attributes": "fields with values, as in `{field: value}`",
    "string": "a string",
    "tuple": "a list, as in `[value, value]`",
}
_NUMBERED = {"too_short": "least", "too_long": "most", "string_too_short": "least", "string_too_long": "most"}


def in_words(kind: str, text: str, context: Mapping[str, Any] | None = None) -> str:
    """Why a value is wrong, to be read behind its field's name.

    Args:
        kind: pydantic's name of the error.
        text: what pydantic says.
        context: what it says it of.
    """
    context = context or {}
    if kind == "union_tag_invalid":
        name, known = str(context["discriminator"]).strip("'"), context["expected_tags"]
        return f"`{name}` must be one of {known}"
    if kind == "union_tag_not_found":
        return (
            f"the field `{str(context['discriminator']).strip(chr(39))}`, which tells its kind, is required"
        )
    if kind in _NUMBERED:
        number = context["min_length" if _NUMBERED[kind] == "least" else "max_length"]
        what = "character" if kind.startswith("string_") else "item"
        return f"must have at {_NUMBERED[kind]} {number} {what}{'' if number == 1 else 's'}"
    if kind == "string_pattern_mismatch":
        return f"must match the pattern {context['pattern']}"
    if kind == "none_required":
        return "must be null"
    name = kind.removesuffix("_parsing").removesuffix("_type")
    if name != kind and name in _TYPES:
        return f"must be {_TYPES[name]}"
    if kind == "int_from_float":
        return f"must be {_TYPES['int']}"
    text = text.removeprefix("Value error, ")
    return re.sub(r"^(Input|String|List|Tuple|Set|Dictionary|Value) should ", "must ", text)
