"""What a JSON schema asks for that llguidance would compile, or follow, for seconds or for ever."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from engine.schema_parts import referred, schema_parts

#: Largest number whose multiples are taken. The expression of multiples of n has n states, all of which are
#: visited before the first token: those of 999,983 take 10 s, and two factors of that size have no end.
LARGEST_MULTIPLE = 100_000
#: Properties of an object that may be left out. Each may come next: of a thousand, a token takes 25 ms.
MOST_OPTIONAL = 1000
# Above, states of a number of one or two digits and zeros are few, as those of ten million.
_ROUND = 100
_HUGE = 1 << 64
_TOGETHER = ("allOf", "anyOf", "oneOf")


def why_too_dear(schema: Any) -> str | None:
    """Why a schema would take too long; None if it does not."""
    parts = list(schema_parts(schema))
    num_optional = max(map(_num_optional, parts), default=0)
    if num_optional > MOST_OPTIONAL:
        return (
            f"of an object's properties {num_optional} may be left out, and at most {MOST_OPTIONAL} are "
            "taken; make some of them `required`"
        )
    if _is_cheap(_common_multiple(parts)):  # whichever of them meet
        return None
    roots = [part for number, part in enumerate(parts) if not number or "$id" in part]
    for part in parts:
        multiple = _common_multiple(_meeting(part, roots))
        if not _is_cheap(multiple):
            return (
                f"multiples of {multiple}, which `multipleOf` comes to for one number, take too long to "
                f"compile; at most {LARGEST_MULTIPLE} is taken"
            )
    return None


def _num_optional(part: dict[str, Any]) -> int:
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, dict):
        return 0
    names = required if isinstance(required, list) else ()
    return len(properties.keys() - {name for name in names if isinstance(name, str)})


def _is_cheap(multiple: int) -> bool:
    return multiple <= LARGEST_MULTIPLE or int(str(multiple).rstrip("0")) < _ROUND


def _common_multiple(parts: Iterable[dict[str, Any]]) -> int:
    """The least integer that is a multiple of what all of them ask for; of huge ones some."""
    common = 1
    for part in parts:
        number = part.get("multipleOf")
        if isinstance(number, int | float) and not isinstance(number, bool) and number > 0:
            common = math.lcm(common, Fraction(str(number)).numerator)
        if common > _HUGE:
            break
    return common


def _meeting(part: dict[str, Any], roots: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The schemas that a value of `part` may have to keep to at once, itself included."""
    found: dict[int, dict[str, Any]] = {}
    left: list[Any] = [part]
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in found:
            continue
        found[id(one)] = one
        for name in _TOGETHER:
            if isinstance(one.get(name), list):
                left += one[name]
        if isinstance(one.get("$ref"), str):
            left += referred(one["$ref"], roots)
    return list(found.values())
