"""What a JSON schema asks for that llguidance would follow another way than it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from engine.schema_parts import VALUES, schema_parts

Number = int | float

# Beyond, integers are not all numbers of double precision, which llguidance reads and writes.
_EXACT = 1 << 53
# So many digits survive being read and written, of numbers that are neither tiny nor huge.
_DIGITS, _LEAST, _MOST = 15, 1e-6, 1e15
# In the direction away from 0: an exclusive bound, its name in draft 4, and those on the other side.
_EXCLUSIVE = (
    (1, "exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum")),
    (-1, "exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum")),
)
# In a pattern: an escape, or a class of characters and what is in it; there, what is an operation in Rust.
_CLASS = re.compile(r"\\.|\[((?:\\.|[^\]\\])*)\]", re.DOTALL)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_OPERATION = re.compile(r"\[|&&|--|~~")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def why_not_exact(schema: Any, is_kept: Callable[[Number], bool]) -> str | None:
    """The first thing in a schema that would be followed another way; None if there is none.

    Args:
        schema: JSON.
        is_kept: whether a number comes out as it is; asked for those of which it is not certain.
    """
    for part in schema_parts(schema):
        for name in VALUES & part.keys():
            for number in _numbers(part[name]):
                if _is_doubtful(number) and not is_kept(number):
                    return f"{number!r} of `{name}` would be written as another number: give it as a string"
        for name in _BOUNDS:
            bound = part.get(name)
            if _is_number(bound) and abs(bound) > _EXACT:
                return f"`{name}` of {bound!r} is beyond 2^53, where not all integers can be told apart"
        reason = _about_properties(part) or _about_items(part) or _about_bounds(part) or _about_patterns(part)
        if reason is not None:
            return reason
    return None


def _about_properties(schema: dict[str, Any]) -> str | None:
    """Keys that the schema does not name may come twice, which leaves fewer properties than were written."""
    least, required = schema.get("minProperties"), schema.get("required")
    if not isinstance(least, int):
        return None
    is_open = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
    named = len(required) if isinstance(required, list) else 0
    if is_open and least - named > 1:
        return (
            f"`minProperties` of {least}, {least - named} more than are required, cannot be promised: keys "
            "that are not named in the schema may come twice"
        )
    return None


def _about_items(schema: dict[str, Any]) -> str | None:
    """In a schema of older drafts, whose keywords these are, `prefixItems` means nothing to llguidance."""
    if "prefixItems" not in schema:
        return None
    if "additionalItems" in schema or isinstance(schema.get("items"), list):
        name = "additionalItems" if "additionalItems" in schema else "items"
        return f"`prefixItems` would be ignored beside this `{name}`, which is of older drafts"
    return None


def _about_bounds(schema: dict[str, Any]) -> str | None:
    """Between an integer and a number with the same whole part, llguidance takes the integer, too."""
    kinds = schema.get("type", "number")
    if "number" not in (kinds if isinstance(kinds, list) else [kinds]):
        return None
    for sign, near, inclusive, others in _EXCLUSIVE:
        bound = schema.get(inclusive) if schema.get(near) is True else schema.get(near)
        if not _is_number(bound) or bound * sign < 0 or bound != int(bound):
            continue
        for name in others:
            other = schema.get(name)
            if _is_number(other) and 0 < (other - bound) * sign < 1:
                return f"`{near}` of {bound!r} beside `{name}` of {other!r} would let {bound!r} through"
    return None


def _about_patterns(schema: dict[str, Any]) -> str | None:
    """In a class of characters, JSON Schema's expressions have no classes and no operations on them."""
    by_pattern = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ())):
        for found in _CLASS.finditer(pattern if isinstance(pattern, str) else ""):
            operation = _OPERATION.search(_ESCAPE.sub(".", found[1] or ""))
            if operation is not None:
                return (
                    f"{operation[0]!r} in `{found[0]}` of a pattern would be read as Rust does, as an "
                    "operation on sets: escape it, or write the class without it"
                )
    return None


def _is_number(value: Any) -> TypeGuard[Number]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[Number]:
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif _is_number(part):
            yield part


def _is_doubtful(number: Number) -> bool:
    if isinstance(number, int):
        return abs(number) > _EXACT
    is_usual = number == 0 or _LEAST <= abs(number) <= _MOST
    return not is_usual or float(f"{number:.{_DIGITS}g}") != number
