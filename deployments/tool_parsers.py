"""Calls of tools in a model's output: from text that arrives in pieces to text and whole calls.

What comes out does not depend on how the text was cut into pieces. A call is told once it is complete and is
valid JSON with the name of a tool that there is; anything else stays the text it is, so that nothing is lost.
Calls that the client forces are another matter: such an answer is no text for anybody, and if it was cut off,
its last call is told as far as it goes.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

#: How each kind of model writes a call, in the words it is told when its template cannot tell it.
CallText = {
    "hermes": '<tool_call>\n{"name": <function name>, "arguments": <arguments object>}\n</tool_call>',
    "json": '{"name": <function name>, "parameters": <arguments object>}',
}


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


class HermesCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in a text, as Hermes and Qwen write."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    is_forced = False
    has_text = True
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        """Of the functions `names`, at most `most` calls; what goes on after those is left out."""
        self._names = names
        self._most = most
        self._held = ""
        self._is_inside = False
        self._skips_space = False
        self.num_calls = 0

    def feed(self, text: str) -> Parsed:
        """See `ToolParser`."""
        self._held += text
        parsed = Parsed()
        while True:
            marker = self.CLOSE if self._is_inside else self.OPEN
            before, found, after = self._held.partition(marker)
            if not found:
                break
            self._held = after
            if self._is_inside:
                self._close(before, parsed)
            else:
                self._add_text(before, parsed)
            self._is_inside = not self._is_inside
        if not self._is_inside:
            held = _overlap(self._held, self.OPEN)
            self._add_text(self._held[: len(self._held) - held], parsed)
            self._held = self._held[len(self._held) - held :]
        return parsed

    def finish(self) -> Parsed:
        """See `ToolParser`; a call that was cut off is text."""
        parsed = Parsed()
        held, self._held = self._held, ""
        if self._is_inside:
            # Some models end their turn instead of closing the last call.
            calls = _calls_in(held, self._names, ("arguments", "parameters"))
            if calls is not None:
                self._add_calls(calls, parsed)
                return parsed
            held = self.OPEN + held
        self._add_text(held, parsed)
        return parsed

    def _close(self, body: str, parsed: Parsed) -> None:
        calls = _calls_in(body, self._names, ("arguments", "parameters"))
        if calls is None:
            self._add_text(f"{self.OPEN}{body}{self.CLOSE}", parsed)
        else:
            self._add_calls(calls, parsed)

    def _add_calls(self, calls: list[tuple[str, str]], parsed: Parsed) -> None:
        self._skips_space = True
        for name, arguments in calls:
            if self._most is None or self.num_calls < self._most:
                parsed.calls.append(_whole(self.num_calls, name, arguments))
                self.num_calls += 1

    def _add_text(self, text: str, parsed: Parsed) -> None:
        if self._skips_space:  # between and after calls it belongs to the form, not to the answer
            text = text.lstrip()
            self._skips_space = not text
        parsed.content += text


class JsonCalls:
    """An answer that is nothing but calls, `{"name": ..., "parameters": {...}}`, as Llama 3 models write.

    Several are separated by `;` or white space, or are a list. Text that begins in any other way is text.
    """

    TAG = "<|python_tag|>"
    is_forced = False
    markers: tuple[str, ...] = (TAG,)

    def __init__(self, names: Collection[str], most: int | None = None, *, has_text: bool = True) -> None:
        """As `HermesCalls`; without text, as decoding was constrained to calls, only calls are told."""
        self.has_text = has_text
        self._names = names
        self._most = most
        self._held = ""
        self._turned_out = ""  # "text", once it cannot be calls (any more)
        self._is_list = False
        self._began = False
        self.num_calls = 0

    def feed(self, text: str) -> Parsed:
        """See `ToolParser`."""
        if self._turned_out == "text":
            return Parsed(text if self.has_text else "")
        self._held += text
        parsed = Parsed()
        while self._turned_out != "text" and self._advance(parsed):
            pass
        if self._turned_out == "text" and not self.num_calls:
            parsed.content += self._held
            self._held = ""
        if not self.has_text:
            parsed.content = ""
        return parsed

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        held, self._held = self._held, ""
        if not self.has_text:
            return Parsed(calls=self._begun(held))
        # After calls, only their punctuation is left; before, it is an answer that was cut off.
        return Parsed(held.strip(" \t\r\n;,]") if self.num_calls else held)

    def _begun(self, held: str) -> list[CallDelta]:
        """The call that was cut off, if its name was complete."""
        match = _BEGUN.match(held)
        if match is None or (self._most is not None and self.num_calls >= self._most):
            return []
        name, arguments = json.loads(match[1]), match[2] or ""
        if name not in self._names:
            return []
        try:
            value, _ = _DECODER.raw_decode(arguments)
            arguments = _json_text(value)
        except (ValueError, RecursionError):
            pass  # not complete
        self.num_calls += 1
        return [_whole(self.num_calls - 1, name, arguments)]

    def _advance(self, parsed: Parsed) -> bool:
        """Take one step through what is held; whether another may follow at once."""
        held = self._held.lstrip(" \t\r\n;,") if self._began else self._held.lstrip()
        if not self._began:
            if self.TAG.startswith(held[: len(self.TAG)]):
                if len(held) < len(self.TAG):
                    return False
                held = held[len(self.TAG) :].lstrip()
            if not held:
                return False
            if held[0] == "[":
                self._is_list, held = True, held[1:].lstrip()
            if not held:
                return False
            if held[0] != "{":
                self._turned_out = "text"
                return False
        elif not held or (self._is_list and held[0] == "]"):
            return False
        try:
            value, end = _DECODER.raw_decode(held)
        except ValueError:
            if not self._began:
                self._is_list = False  # looked at again, with its bracket, when more has come
            return False
        except RecursionError:  # nested as no call is
            self._turned_out = "text"
            return False
        call = _call(value, self._names, ("parameters", "arguments"), any_type=not self.has_text)
        if call is None:
            self._turned_out = "text"
            if self.num_calls:
                parsed.content += held
                self._held = ""
            return False
        self._began, self._held = True, held[end:]
        if self._most is None or self.num_calls < self._most:
            parsed.calls.append(_whole(self.num_calls, *call))
            self.num_calls += 1
        return True


class NamedCall:
    """An answer that is nothing but the arguments of one call; each piece of it is told as it comes."""

    markers: tuple[str, ...] = ()
    is_forced = True
    has_text = False

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def feed(self, text: str) -> Parsed:
        """See `ToolParser`."""
        if self.num_calls:
            return Parsed(calls=[CallDelta(0, text)] if text else [])
        if not text:
            return Parsed()
        self.num_calls = 1
        return Parsed(calls=[_whole(0, self._name, text)])

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        return Parsed()


#: What is left of a list of calls that ends within one: its name, and its arguments as far as they go.
_BEGUN = re.compile(
    r"""[\s;,\[]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"parameters"\s*:\s*(.*))?""", re.DOTALL
)

_PARSERS: dict[str, Callable[[Collection[str], int | None], ToolParser]] = {
    "hermes": HermesCalls,
    "json": JsonCalls,
}


def make_parser(kind: str, names: Collection[str], most: int | None = None) -> ToolParser:
    """The parser of that kind ("hermes" or "json") for functions `names`, telling at most `most` calls."""
    return _PARSERS[kind](names, most)


def kind_for_template(template: str) -> str:
    """How a model with that chat template writes calls, "none" if it shows no way."""
    if HermesCalls.OPEN in template:
        return "hermes"
    if "tools" in template and '"parameters"' in template:
        return "json"
    return "none"


def _whole(index: int, name: str, arguments: str) -> CallDelta:
    return CallDelta(index, arguments, call_id=f"call_{uuid.uuid4().hex[:24]}", name=name)


def _calls_in(text: str, names: Collection[str], fields: tuple[str, ...]) -> list[tuple[str, str]] | None:
    """The calls that a text consists of; None if it is anything else."""
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    calls = [_call(item, names, fields) for item in (value if isinstance(value, list) else [value])]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _call(
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
    return name, _json_text(arguments)


def _json_text(value: Any) -> str:
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
_DECODER = json.JSONDecoder(parse_constant=_no_json, parse_float=_finite)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
