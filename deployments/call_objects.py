"""Calls of tools that are written as JSON objects, read while they are written."""

from __future__ import annotations

import json
import re
from typing import Literal

from deployments.json_extent import JsonExtent
from deployments.tool_calls import DECODER, Parsed, Teller, overlap, read_call

_STRING = r'"(?:[^"\\]|\\.)*"'
_SPACE = r"[ \t\r\n]*"


def _named(key: str) -> str:
    """An object up to its name, which stands at `key`."""
    return rf'\{{{_SPACE}{_others(key)}"{key}"{_SPACE}:{_SPACE}(?P<name>{_STRING})'


def _before_arguments(key: str) -> str:
    before = rf"{_named(key)}{_SPACE},{_SPACE}{_others(key)}"
    return rf'{before}"(?:arguments|parameters)"{_SPACE}:{_SPACE}'


def _others(key: str) -> str:
    """Members that are neither, as `"type": "function"`."""
    other = rf'"(?!(?:{key}|arguments|parameters)")[^"\\]*"'
    return rf"(?:{other}{_SPACE}:{_SPACE}{_STRING}{_SPACE},{_SPACE})*"


# An object up to its arguments, which are an object, too, unless the call is forced.
_HEAD = re.compile(rf"{_before_arguments('name')}(?=\{{)", re.DOTALL)
_TOOL_HEAD = re.compile(rf"{_before_arguments('tool_name')}(?=\{{)", re.DOTALL)
_FORCED_HEAD = re.compile(rf"{_before_arguments('name')}(?=[^ \t\r\n])", re.DOTALL)
_FORCED_NAME = re.compile(_named("name"), re.DOTALL)
_OPENING = re.compile(r"\s*(\[?)\s*")
_SEPARATORS = re.compile(r"[\s;,]*")


class Arguments:
    """The arguments of a call that is told already, passed on as they are written.

    If they turn out to be no JSON, nobody knows where they end: they go on as far as `stop`.

    Args:
        teller: whom they are told by.
        stop: text that ends broken ones; none ends with the answer.
    """

    def __init__(self, teller: Teller, stop: str = "") -> None:
        self._teller = teller
        self._stop = stop
        self._extent = JsonExtent()
        self._held = ""

    @property
    def is_broken(self) -> bool:
        """Whether they are no JSON."""
        return self._extent.is_broken

    def feed(self, text: str, parsed: Parsed) -> str | None:
        """What follows them, once that is known."""
        if not self.is_broken:
            size = self._extent.feed(text)
            self._teller.more(text[:size], parsed)
            text = text[size:]
            if self._extent.is_complete:
                return text
            if not self.is_broken:
                return None
        text = self._held + text
        if self._stop and (at := text.find(self._stop)) >= 0:
            self._teller.more(text[:at], parsed)
            return text[at:]
        size = len(text) - overlap(text, self._stop)
        self._teller.more(text[:size], parsed)
        self._held = text[size:]
        return None

    def finish(self, parsed: Parsed) -> None:
        """No more text comes."""
        self._teller.more(self._held, parsed)


class CallObjects:
    """Reads `{"name": ..., "arguments": {...}}` (or `parameters`), one or several of them.

    A call is told as soon as its name and the beginning of its arguments are there, and its arguments as they
    are written. If these come before the name, it is told when it is complete, its arguments as JSON anew.

    Args:
        teller: whom calls are told by.
        is_sequence: whether calls may follow each other outside of a list.
        is_forced: whether decoding was constrained to calls: arguments may be of any type, and a call that
            was cut off counts from its name on.
        stop: as of `Arguments`.

    Attributes:
        is_certain: whether there is a call, so that what was read is no text.
        rest: what does not belong to the calls, once that is known; all of the text if there are none.
    """

    def __init__(
        self,
        teller: Teller,
        *,
        is_sequence: bool = False,
        is_forced: bool = False,
        stop: str = "",
        name_key: Literal["name", "tool_name"] = "name",
    ) -> None:
        self._teller = teller
        self._is_sequence = is_sequence
        self._is_forced = is_forced
        self._stop = stop
        self._name_key = name_key
        self._text = ""  # what is undecided
        self._object_at = -1  # where in it an object begins that may be a call
        self._extent = JsonExtent()  # of that object up to `_num_seen`, or of a call behind its arguments
        self._num_seen = 0
        self._arguments: Arguments | None = None
        self._is_behind = False  # the arguments, in a call
        self._is_list = False
        self.is_certain = False
        self.rest: str | None = None

    def feed(self, text: str, parsed: Parsed) -> bool:
        """More text, before there is a rest; whether there is one now."""
        self._text += text
        while self.rest is None and self._advance(parsed):
            pass
        return self.rest is not None

    def finish(self, parsed: Parsed) -> None:
        """No more text comes: there is a rest now."""
        if self._arguments is not None:
            self._arguments.finish(parsed)
        elif self._is_forced and self._object_at >= 0:
            match = _FORCED_NAME.match(self._text, self._object_at)
            if match is not None and (name := self._name(match["name"])):
                self._begin(name, "", parsed)
                self._text = ""
        if self.rest is None:
            self.rest = "" if self._is_behind else self._text

    def _advance(self, parsed: Parsed) -> bool:
        """Decide what can be decided next; whether anything was."""
        if self._arguments is not None:
            rest = self._arguments.feed(self._text, parsed)
            self._text = rest or ""
            if rest is None:
                return False
            if self._arguments.is_broken:
                self.rest = rest
            self._arguments, self._is_behind, self._extent = None, True, JsonExtent(in_object=True)
            return True
        if self._is_behind:
            self._text = self._text[self._extent.feed(self._text) :]
            if self._extent.is_complete or self._extent.is_broken:  # some models forget the last bracket
                self._is_behind = False
                return self._end_object()
            return False
        if self._object_at < 0:
            return self._find_object()
        return self._read_head(parsed)

    def _find_object(self) -> bool:
        opening = (_SEPARATORS if self.is_certain else _OPENING).match(self._text)
        assert opening is not None  # it may be empty
        at = opening.end()
        if self.is_certain:
            self._text, at = self._text[at:], 0
        else:
            self._is_list = bool(opening[1])
        following = self._text[at : at + 1]
        if not following:
            return False
        if following == "{":
            self._object_at = self._num_seen = at
            self._extent = JsonExtent()
        else:
            ends_list = self.is_certain and self._is_list and following == "]"
            self.rest = self._text[1:] if ends_list else self._text
        return True

    def _read_head(self, parsed: Parsed) -> bool:
        was_nested = self._extent.is_nested
        self._num_seen += self._extent.feed(self._text[self._num_seen :])
        head = None
        # Members before the arguments are strings, so that the first bracket within is theirs, or nobody's.
        # Looked for with every token they would take ever longer, where an object is no call.
        if self._is_forced or (self._extent.is_nested and not was_nested):
            free = _HEAD if self._name_key == "name" else _TOOL_HEAD
            head = (_FORCED_HEAD if self._is_forced else free).match(self._text, self._object_at)
        if head is not None:
            name = self._name(head["name"])
            if not name:
                self.rest = self._text
                return True
            self._begin(name, "", parsed)
            self._arguments = Arguments(self._teller, self._stop)
            self._text, self._object_at = self._text[head.end() :], -1
            return True
        if self._extent.is_complete:
            call = self._call(self._text[self._object_at : self._num_seen])
            if call is not None:
                self._begin(*call, parsed)
                self._text = self._text[self._num_seen :]
                return self._end_object()
        if self._extent.is_complete or self._extent.is_broken:
            self.rest = self._text
            return True
        return False

    def _end_object(self) -> bool:
        self._object_at = -1
        if not (self._is_list or self._is_sequence):
            self.rest = self._text
        return True

    def _begin(self, name: str, arguments: str, parsed: Parsed) -> None:
        self.is_certain = True
        self._teller.begin(name, arguments, parsed)

    def _call(self, text: str) -> tuple[str, str] | None:
        try:
            value = DECODER.decode(text)
        except (ValueError, RecursionError):
            return None
        return read_call(value, self._teller.names, key=self._name_key, any_type=self._is_forced)

    def _name(self, written: str) -> str:
        """The name that a JSON string is, if there is a function of that name; else nothing."""
        try:
            name = json.loads(written)
        except ValueError:
            return ""
        return name if name in self._teller.names else ""
