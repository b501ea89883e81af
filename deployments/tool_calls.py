"""Calls of tools as they are read in a text and told to a client."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

NewId = Callable[[], str]


def openai_id() -> str:
    """A new call's id, as OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


def mistral_id() -> str:
    """A new call's id as Mistral's chat templates demand it: nine letters and digits."""
    return uuid.uuid4().hex[:9]


@dataclass(frozen=True)
class CallDelta:
    """News of a call.

    Attributes:
        index: which call of the answer.
        arguments: more of the JSON text of its arguments.
        call_id, name: with the first news of it, else empty.
    """

    index: int
    arguments: str
    call_id: str = ""
    name: str = ""


@dataclass
class Parsed:
    """What some text turned out to be: `content` for people, then `calls`."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolParser(Protocol):
    """Reads the output of one choice.

    Attributes:
        num_calls: calls begun so far.
        markers: tokens that the parser needs to see in the text, though they may be special ones.
        is_forced: whether the answer is a call that the client named, and not the model's choice.
        has_text: whether the answer may be text, besides calls or instead of them.
    """

    num_calls: int
    is_forced: bool
    has_text: bool
    markers: tuple[str, ...]

    def feed(self, text: str) -> Parsed:
        """What became certain with `text`."""
        ...

    def finish(self) -> Parsed:
        """The rest, when no more text comes."""
        ...


class CallsInText:
    """What parsers of calls that stand in a text have in common: they hold back what may become one.

    Attributes:
        num_calls: see `ToolParser`.
    """

    is_forced = False
    has_text = True

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        """Of the functions `names`, at most `most` calls; what goes on after those is left out."""
        self._names = names
        self._most = most
        self._held = ""
        self._is_inside = False
        self._skips_space = False
        self.num_calls = 0

    def _add_calls(self, calls: list[tuple[str, str]], parsed: Parsed, new_id: NewId) -> None:
        self._skips_space = True
        for call in calls:
            if self._most is None or self.num_calls < self._most:
                parsed.calls.append(whole_call(self.num_calls, call, new_id))
                self.num_calls += 1

    def _add_text(self, text: str, parsed: Parsed) -> None:
        if self._skips_space:  # between and after calls it belongs to the form, not to the answer
            text = text.lstrip()
            self._skips_space = not text
        parsed.content += text


def whole_call(index: int, call: tuple[str, str], new_id: NewId) -> CallDelta:
    """The news of a call, name and arguments, that is told at once."""
    name, arguments = call
    return CallDelta(index, arguments, call_id=new_id(), name=name)


def calls_in(text: str, names: Collection[str], fields: tuple[str, ...]) -> list[tuple[str, str]] | None:
    """The calls that a text consists of; None if it is anything else."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return read_calls(value, names, fields)


def read_calls(value: Any, names: Collection[str], fields: tuple[str, ...]) -> list[tuple[str, str]] | None:
    """The calls that a JSON value is, one or a list of them; None if it is anything else."""
    calls = [read_call(item, names, fields) for item in (value if isinstance(value, list) else [value])]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def read_call(
    value: Any, names: Collection[str], fields: tuple[str, ...], *, any_type: bool = False
) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a call; None if it is none, or of a function that is not there.

    Arguments are an object, unless `any_type`, for a schema that asks for something else.
    """
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or name not in names:
        return None
    arguments: Any = next((value[one] for one in fields if one in value), {})
    if not isinstance(arguments, dict) and not any_type:
        return None
    return name, json_text(arguments)


def json_text(value: Any) -> str:
    """A value that was read from JSON, as JSON again."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: only an escape can say it
        return json.dumps(value)
    return text


def _finite(text: str) -> float:
    """A number that JSON can say again: of one beyond all doubles, the largest there is."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _no_json(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


# Python's own would take NaN and Infinity for numbers, and 1e999 for infinity.
DECODER = json.JSONDecoder(parse_constant=_no_json, parse_float=_finite)


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
