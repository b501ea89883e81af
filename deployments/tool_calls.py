"""Calls of tools as they are read in a text and told to a client."""

from __future__ import annotations

import json
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

#: Makes the id of a call: of a function by its name, after so many calls of the answer.
NewId = Callable[[str, int], str]

#: Most characters of a function's name. OpenAI takes 64; names with a server in front, as of the Model
#: Context Protocol, are longer.
LONGEST_NAME = 128
#: Names of functions, as a regular expression.
FUNCTION_NAME = rf"[a-zA-Z0-9_.-]{{1,{LONGEST_NAME}}}"


def openai_id(name: str, number: int) -> str:
    """A new call's id, as OpenAI's look; neither of the arguments shows in it."""
    return f"call_{uuid.uuid4().hex[:24]}"


def mistral_id(name: str, number: int) -> str:
    """A new call's id as Mistral's chat templates demand it: nine letters and digits, as of `openai_id`."""
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


class Parsed:
    """What some text turned out to be, in its order: text for people, and news of calls.

    Attributes:
        reasoning: what the model thought before all of it.
        parts: never two in a row of the same text or the same call.
    """

    def __init__(self, content: str = "", reasoning: str = "") -> None:
        self.reasoning = reasoning
        self.parts: list[str | CallDelta] = []
        self.add(content)

    @property
    def content(self) -> str:
        """The text of all parts."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallDelta]:
        """The news of calls."""
        return [part for part in self.parts if isinstance(part, CallDelta)]

    def add(self, part: str | CallDelta) -> None:
        """Go on with a part; no text is none."""
        last = self.parts[-1] if self.parts else None
        if isinstance(part, str):
            if isinstance(last, str):
                self.parts[-1] = last + part
            elif part:
                self.parts.append(part)
        elif isinstance(last, CallDelta) and last.index == part.index:
            self.parts[-1] = replace(last, arguments=last.arguments + part.arguments)
        else:
            self.parts.append(part)


class ToolParser(Protocol):
    """Reads the output of one choice.

    Attributes:
        markers: tokens that the parser needs to see in the text, though they may be special ones.
        is_forced: whether the answer is a call that the client named, and not the model's choice.
        has_text: whether the answer may be text, besides calls or instead of them.
    """

    is_forced: bool
    has_text: bool
    markers: tuple[str, ...]

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        ...

    def feed(self, text: str) -> Parsed:
        """What became certain with `text`."""
        ...

    def finish(self) -> Parsed:
        """The rest, when no more text comes."""
        ...


class Teller:
    """Tells the calls of one answer, one after the other.

    Args:
        names: of the functions that there are.
        most: how many calls are told, and what goes beyond is left out; None for all.
        new_id: makes their ids.

    Attributes:
        num_calls: told so far.
    """

    def __init__(self, names: Collection[str], most: int | None, new_id: NewId) -> None:
        self.names = names
        self._most = most
        self._new_id = new_id
        self._tells = False
        self._ids: set[str] = set()
        self.num_calls = 0

    def begin(self, name: str, arguments: str, parsed: Parsed, call_id: str = "") -> None:
        """The next call, with its arguments as far as they are known, and its id if the model wrote one.

        Clients tell calls apart by their ids: one that came before is replaced.
        """
        self._tells = self._most is None or self.num_calls < self._most
        if self._tells:
            number = self.num_calls
            while not call_id or call_id in self._ids:
                call_id, number = self._new_id(name, number), number + 1
            self._ids.add(call_id)
            parsed.add(CallDelta(self.num_calls, arguments, call_id=call_id, name=name))
            self.num_calls += 1

    def more(self, arguments: str, parsed: Parsed) -> None:
        """More arguments of that call."""
        if self._tells and arguments:
            parsed.add(CallDelta(self.num_calls - 1, arguments))


class CallsInText(ABC):
    """What parsers of calls that stand in a text have in common: they hold back what may become one."""

    is_forced = False
    has_text = True

    def __init__(self, names: Collection[str], most: int | None = None, new_id: NewId = openai_id) -> None:
        """Of the functions `names`, at most `most` calls; what goes on after those is left out."""
        self._teller = Teller(names, most, new_id)
        self._held = ""
        self._skips_space = False

    @property
    def num_calls(self) -> int:
        """See `ToolParser`."""
        return self._teller.num_calls

    def feed(self, text: str) -> Parsed:
        """See `ToolParser`."""
        self._held += text
        parsed = Parsed()
        self._take(parsed)
        return parsed

    def _take(self, parsed: Parsed) -> None:
        """Take all that is certain out of what is held."""
        while self._advance(parsed):
            pass

    @abstractmethod
    def _advance(self, parsed: Parsed) -> bool:
        """One step of that; whether there may be another."""

    def _find(self, marker: str, parsed: Parsed) -> bool:
        """Whether a call may begin: what is held is text up to the marker, and then begins behind it."""
        before, found, after = self._held.partition(marker)
        if found:
            self._add_text(before, parsed)
            self._held = after
            return True
        kept = overlap(self._held, marker)
        self._add_text(self._held[: len(self._held) - kept], parsed)
        self._held = self._held[len(self._held) - kept :]
        return False

    def _first(self, markers: Sequence[str]) -> tuple[int, str]:
        """Where the first of some markers is in what is held, and which; none if at most its beginning is."""
        found = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        if found:
            return min(found)
        return len(self._held) - max(overlap(self._held, marker) for marker in markers), ""

    def _skip_closing(self, marker: str) -> bool:
        """Leave out a marker that what is held may begin with; whether it is known if it does."""
        following = self._held.lstrip()
        if len(following) < len(marker) and marker.startswith(following):
            return False
        if following.startswith(marker):
            self._held = following[len(marker) :]
        return True

    def _add_text(self, text: str, parsed: Parsed) -> None:
        if self._skips_space:  # between and after calls it belongs to the form, not to the answer
            text = text.lstrip()
            self._skips_space = not text
        parsed.add(text)


def read_call(
    value: Any, names: Collection[str], *, key: str = "name", any_type: bool = False
) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a call; None if it is none, or of a function that is not there.

    The name stands at `key`. Arguments are an object, unless `any_type`, for a schema that asks for
    something else.
    """
    if not isinstance(value, dict):
        return None
    name = value.get(key)
    if not isinstance(name, str) or name not in names:
        return None
    arguments: Any = next((value[one] for one in ("arguments", "parameters") if one in value), {})
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
