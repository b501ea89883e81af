"""How two servers' answers to one request differ: fields, their types and their values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["missing", "added", "type", "value", "status"]
# Made anew for every answer, different where texts are cut differently, or the server's own.
UNLIKE = frozenset(
    {"created", "created_at", "completed_at", "id", "item_id", "call_id", "request_id", "sequence_number"}
    | {"system_fingerprint", "cached_tokens", "root", "metrics"}
)
# Said as a whole where it is said in pieces of an answer.
_WHOLE = frozenset({"type", "role", "id", "name", "finish_reason"})
# Log-probabilities of two implementations in float32 agree to this.
TOLERANCE = 2e-3


@dataclass(frozen=True, slots=True)
class Difference:
    """One place at which two answers differ.

    Attributes:
        where: path in the answer, as `choices[].message.content`.
        kind: `missing` here or `added` here, another `type`, `value` or HTTP `status`.
        ours: what this server has there, as JSON; empty for `missing`.
        theirs: what the other has there; empty for `added`.
    """

    where: str
    kind: Kind
    ours: str
    theirs: str


def _type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    names = {str: "string", type(None): "null", dict: "object", list: "array"}
    return names.get(type(value), type(value).__name__)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


def of_values(ours: Any, theirs: Any, where: str = "") -> list[Difference]:
    """Where two JSON values differ; what `UNLIKE` names is compared by type alone.

    A field that is null in one and missing in the other says the same in both.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            here, there = ours.get(name), theirs.get(name)
            place = f"{where}.{name}" if where else name
            if here is None and there is None:
                continue
            if name not in ours or here is None:
                found.append(Difference(place, "missing", "", _short(there)))
            elif name not in theirs or there is None:
                found.append(Difference(place, "added", _short(here), ""))
            elif name in UNLIKE:
                if _type(here) != _type(there):
                    found.append(Difference(place, "type", _short(here), _short(there)))
            else:
                found += of_values(here, there, place)
        return found
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [Difference(f"{where}[]", "value", _short(ours), _short(theirs))]
        pairs = zip(ours, theirs, strict=True)
        each = [of_values(here, there, f"{where}[]") for here, there in pairs]
        return _once(difference for differences in each for difference in differences)
    if _type(ours) != _type(theirs):
        return [Difference(where, "type", _short(ours), _short(theirs))]
    same = abs(ours - theirs) <= TOLERANCE if _type(ours) == "number" else ours == theirs
    return [] if same else [Difference(where, "value", _short(ours), _short(theirs))]


def _once(differences: Iterable[Difference]) -> list[Difference]:
    """The first at each place and of each kind."""
    found: dict[tuple[str, str], Difference] = {}
    for difference in differences:
        found.setdefault((difference.where, difference.kind), difference)
    return list(found.values())


def _kind_of_chunk(chunk: Mapping[str, Any]) -> str:
    """What an event is: its type where it says one, else its part in a stream of chunks."""
    if isinstance(chunk.get("type"), str):
        return str(chunk["type"])
    if "error" in chunk:
        return "error"
    choices = chunk.get("choices") or []
    if not choices:
        return "usage"
    # The last text may come with the reason why it ends, and the role with the first.
    return "choices"


def _merged(values: Sequence[Any], *, join: bool) -> Any:
    """What several events say in one field: objects by field, parts with an `index` by that.

    With `join`, as all within `delta`, texts and lists are pieces to be joined but for `_WHOLE`; without it
    the last counts.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    if all(isinstance(value, dict) for value in known):
        names = dict.fromkeys(name for value in known for name in value)
        return {
            name: _merged(
                [value.get(name) for value in known], join=(join or name == "delta") and name not in _WHOLE
            )
            for name in names
        }
    if join and all(isinstance(value, str) for value in known):
        return "".join(known)
    if join and all(isinstance(value, list) for value in known):
        items = [item for value in known for item in value]
        return (
            _by_index(items) if all(isinstance(item, dict) and "index" in item for item in items) else items
        )
    return known[-1]


def _by_index(parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Choices or calls, each merged from its pieces."""
    pieces: dict[int, list[Any]] = {}
    for part in parts:
        pieces.setdefault(part["index"], []).append({k: v for k, v in part.items() if k != "index"})
    return [_merged(pieces[index], join=True) for index in sorted(pieces)]


def of_stream(events: Sequence[str]) -> dict[str, Any]:
    """The data of a stream's events as one value that does not depend on where texts were cut.

    Returns:
        `done`, whether `[DONE]` came last; `order` of the events' kinds: of typed ones without repeats in a
        row, of chunks by their first; `choices`, merged; and by kind `fields` of the events, without choices.
    """
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    order: list[str] = []
    kinds: dict[str, list[Any]] = {}
    for chunk in chunks:
        kind = _kind_of_chunk(chunk)
        if (order[-1:] != [kind]) if "type" in chunk else (kind not in order):
            order.append(kind)
        kinds.setdefault(kind, []).append({name: chunk[name] for name in chunk if name != "choices"})
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    return {
        "done": bool(events) and events[-1] == "[DONE]",
        "order": order,
        "choices": _by_index(choices),
        "fields": {kind: _merged(found, join=False) for kind, found in kinds.items()},
    }
