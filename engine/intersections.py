"""Regular expressions that one text has to match all at once, of which many are compiled for ever.

llguidance's fuel does not count the work of intersecting them, which doubles with each: of eight it is tenths
of a second, of twelve some seconds, and of thirty all the memory that there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

from engine.schema_parts import referred, schema_parts

#: Most expressions that are intersected.
MOST_TOGETHER = 8

# In Lark: strings, comments and expressions, in which `&` means nothing; and how a definition begins.
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
_DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)[^:\n&]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_EXPRESSIONS = ("pattern", "format")
# What an object's or a list's values are of; those of a name of its own are told apart.
_ANY_VALUE = ("additionalProperties", "items", "unevaluatedItems", "unevaluatedProperties")

# Expressions that a text has to match: by the name of the property that it is, or None for the value itself.
_Found = dict[str | None, frozenset[str]]
Node = TypeVar("Node", bound=Hashable)


def why_intersects_too_many(lark: str) -> str | None:
    """Why a grammar in Lark would take too long for its intersections; None if it does not."""
    text = _LITERAL.sub(" ", lark)
    if text.count("&") < MOST_TOGETHER:
        return None
    starts = [*_DEFINITION.finditer(text)]
    ends = [*(start.start() for start in starts[1:]), len(text)]
    bodies: dict[str, str] = {}
    for start, end in zip(starts, ends, strict=True):
        bodies[start[1]] = bodies.get(start[1], "") + text[start.end() : end]
    names = {name: {*_NAME.findall(body)} & bodies.keys() for name, body in bodies.items()}
    numbers: dict[str, int] = {}
    for name in _from_below(bodies, names.__getitem__):
        own, within = bodies[name].count("&"), [numbers.get(other, 0) for other in names[name]]
        numbers[name] = min(own + sum(within), MOST_TOGETHER) if own else max(within, default=0)
        if numbers[name] >= MOST_TOGETHER:
            return (
                f"`{name}` intersects more than {MOST_TOGETHER} expressions, which takes too long to compile"
            )
    return None


def why_matches_too_many(schema: Any) -> str | None:
    """Why a JSON schema would take too long for strings of several patterns; None if it does not."""
    parts = [*schema_parts(schema)]
    if len({text for part in parts for text in _own(part)}) <= MOST_TOGETHER:
        return None
    roots = [part for number, part in enumerate(parts) if not number or "$id" in part]
    by_id = {id(part): part for part in parts}
    found: dict[int, _Found] = {}

    def below(key: int) -> list[int]:
        return [id(one) for one in _below(by_id[key], roots) if id(one) in by_id]

    for key in _from_below(by_id, below):
        found[key] = _found_in(by_id[key], roots, found)
        if any(len(texts) > MOST_TOGETHER for texts in found[key].values()):
            return (
                f"more than {MOST_TOGETHER} patterns and formats have to be met by one string, which takes "
                "too long to compile"
            )
    return None


def _own(part: dict[str, Any]) -> frozenset[str]:
    return frozenset(part[name] for name in _EXPRESSIONS if isinstance(part.get(name), str))


def _found_in(part: dict[str, Any], roots: list[dict[str, Any]], found: dict[int, _Found]) -> _Found:
    """What is found in a schema, when that is known of the schemas within it."""
    within: _Found = {}
    for name, value in _values(part):
        for where, texts in found.get(id(value), {}).items():
            _keep_more(within, name if where is None else where, texts)
    together: _Found = {None: _own(part)}
    alternatives = [_more(found, part.get(name)) for name in ("anyOf", "oneOf")]
    if isinstance(part.get("$ref"), str):
        alternatives.append(_more(found, [*referred(part["$ref"], roots)]))
    every = part.get("allOf")
    for one in (
        within,
        *alternatives,
        *(found.get(id(one), {}) for one in (every if isinstance(every, list) else ())),
    ):
        for where, texts in one.items():
            together[where] = together.get(where, frozenset()) | texts
    return together


def _more(found: dict[int, _Found], schemas: Any) -> _Found:
    """Of alternatives, the most that one of them has."""
    most: _Found = {}
    for schema in schemas if isinstance(schemas, list) else ():
        for where, texts in found.get(id(schema), {}).items():
            _keep_more(most, where, texts)
    return most


def _keep_more(kept: _Found, where: str | None, texts: frozenset[str]) -> None:
    if len(texts) > len(kept.get(where, ())):
        kept[where] = texts


def _values(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas of what a value holds, each with a name."""
    for keyword in ("properties", "patternProperties"):
        named = part.get(keyword)
        if isinstance(named, dict):
            yield from named.items()
    for keyword in _ANY_VALUE:
        yield keyword, part.get(keyword)
    for keyword in ("items", "prefixItems"):
        listed = part.get(keyword)
        if isinstance(listed, list):
            yield from ((f"{keyword}/{number}", one) for number, one in enumerate(listed))


def _below(part: dict[str, Any], roots: list[dict[str, Any]]) -> list[Any]:
    """What `_found_in` looks at."""
    below = [value for _, value in _values(part)]
    for name in ("allOf", "anyOf", "oneOf"):
        if isinstance(part.get(name), list):
            below += part[name]
    if isinstance(part.get("$ref"), str):
        below += referred(part["$ref"], roots)
    return below


def _from_below(nodes: Iterable[Node], below: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Each node behind those below it, but for circles; by a list, since they may be thousands deep."""
    seen: set[Node] = set()
    left = [(node, False) for node in nodes]
    while left:
        node, is_done = left.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            left.append((node, True))
            left += [(one, False) for one in below(node) if one not in seen]
