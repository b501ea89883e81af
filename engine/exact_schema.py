"""What a JSON schema asks for that llguidance would follow another way than it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from engine.schema_parts import VALUES, schema_parts

Number = int | float

# Beyond, integers are not all numbers of double precision, which llguidance reads and writes.
_EXACT = 1 << 53
# So many digits survive being read and written, of numbers that are neither tiny nor huge.
_DIGITS, _LEAST, _MOST = 15, 1e-6, 1e15
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
            if isinstance(bound, int | float) and not isinstance(bound, bool) and abs(bound) > _EXACT:
                return f"`{name}` of {bound!r} is beyond 2^53, where not all integers can be told apart"
        reason = _about_properties(part)
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


def _numbers(value: Any) -> Iterator[Number]:
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif isinstance(part, int | float) and not isinstance(part, bool):
            yield part


def _is_doubtful(number: Number) -> bool:
    if isinstance(number, int):
        return abs(number) > _EXACT
    is_usual = number == 0 or _LEAST <= abs(number) <= _MOST
    return not is_usual or float(f"{number:.{_DIGITS}g}") != number
