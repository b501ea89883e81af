"""The JSON schemas of a constraint, and all schemas within one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from engine.constraint import Constraint

#: Keywords whose values are schemas by name.
BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
#: Keywords whose values are JSON that an answer may hold.
VALUES = frozenset({"const", "enum"})
_NO_SCHEMAS = frozenset({"default", "examples", "required", "type"})

# In a grammar in Lark, of a rule that is the JSON of a schema.
_IN_GRAMMAR = re.compile(r"%json\s*(?=\{)")


def schemas_of(constraint: Constraint) -> Iterator[Any]:
    """The schema that a constraint is, or those that its grammar holds."""
    if constraint.kind == "json_schema":
        yield json.loads(constraint.text)
    elif constraint.kind == "grammar":
        for match in _IN_GRAMMAR.finditer(constraint.text):
            try:
                schema, _ = json.JSONDecoder().raw_decode(constraint.text, match.end())
            except (ValueError, RecursionError):  # of a string or a comment, or llguidance says what is wrong
                continue
            yield schema


def schema_parts(schema: Any) -> Iterator[dict[str, Any]]:
    """It and all within it; by a list of what is left, since it may be nested deeper than Python's stack."""
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        if not isinstance(part, dict):
            continue
        yield part
        for name, value in part.items():
            if name in BY_NAME and isinstance(value, dict):
                left += value.values()
            elif name not in VALUES and name not in _NO_SCHEMAS:
                left.append(value)


def referred(reference: str, roots: list[dict[str, Any]]) -> Iterator[Any]:
    """What `#/$defs/Size` stands for, in each of the documents that there are."""
    names = reference.partition("#")[2].split("/")[1:]
    for found in roots:
        value: Any = found
        for name in names:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                value = value.get(name) if isinstance(value, dict) else None
        yield value
