"""Calls of tools as models write them in Python: `name(key=value, ...)`."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from deployments.python_values import PythonExtent, PythonString, python_value_text, quote_at
from deployments.tool_calls import FUNCTION_NAME, CallsInText, Parsed, Teller, json_text

_KEY_NAME = r"[^\W\d]\w{0,127}"
# A call up to its first argument, or to the bracket that ends it; and what may become that.
_HEAD = re.compile(rf"({FUNCTION_NAME})\(\s*(?=\)|{_KEY_NAME}\s*=[^=])")
_MAY_BE_HEAD = re.compile(rf"{FUNCTION_NAME}(?:\(\s*(?:{_KEY_NAME}\s*=?)?)?")
_KEY = re.compile(rf"({_KEY_NAME})\s*=(?=[^=])")
_MAY_BE_KEY = re.compile(rf"(?:{_KEY_NAME}\s*=?)?")
_SEPARATORS = " \t\r\n,;"


class _Arguments:
    """The arguments of a call that is told already: strings are told as they are written, others complete.

    Behind something that is no argument nobody knows where the call ends: all of it is told as it stands.
    """

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._held = ""
        self._key = ""  # of the value that is being read
        self._extent = PythonExtent()
        self._num_seen = 0
        self._string: PythonString | None = None  # that the value is
        self._num_told = 0
        self._is_broken = False

    def feed(self, text: str, parsed: Parsed) -> str | None:
        """What follows them, once that is known."""
        self._held += text
        while not self._is_broken:
            if self._key:
                if not self._read_value(parsed):
                    return None
            elif self._held.startswith(")"):
                self._teller.more("}" if self._num_told else "{}", parsed)
                return self._held[1:]
            elif not self._read_key():
                return None
        self._teller.more(self._held, parsed)
        self._held = ""
        return None

    def _read_key(self) -> bool:
        """Up to the next value, or the closing bracket; whether either is there, or neither can be."""
        following = self._held.lstrip(_SEPARATORS if self._num_told else None)
        match = _KEY.match(following)
        if match is not None:
            self._key, self._held = match[1], following[match.end() :]
            self._extent, self._num_seen = PythonExtent(), 0
            return True
        if following.startswith(")"):
            self._held = following
            return True
        self._is_broken = _MAY_BE_KEY.fullmatch(following) is None
        return self._is_broken

    def _read_value(self, parsed: Parsed) -> bool:
        if self._string is not None:
            return self._read_string(self._string, parsed)
        if not self._num_seen:
            self._held = self._held.lstrip()
            if self._held[:1] in ("'", '"'):
                quote = quote_at(self._held, 0)
                if quote:
                    self._begin_value('"', parsed)
                    self._string, self._held = PythonString(quote), self._held[len(quote) :]
                return bool(quote)
        self._num_seen = self._extent.feed(self._held, self._num_seen)
        if not self._extent.is_complete:
            return False
        written, self._held = self._held[: self._num_seen], self._held[self._num_seen :]
        self._begin_value(python_value_text(written), parsed)
        self._key = ""
        return True

    def _begin_value(self, told: str, parsed: Parsed) -> None:
        opening = ", " if self._num_told else "{"
        key = json.dumps(self._key, ensure_ascii=False)
        self._teller.more(f"{opening}{key}: {told}", parsed)
        self._num_told += 1

    def _read_string(self, string: PythonString, parsed: Parsed) -> bool:
        """More of the value, or what follows: another string, which belongs to it, or the next argument."""
        if not string.is_complete:
            self._teller.more(json_text(string.feed(self._held))[1:-1], parsed)
            self._held = string.rest
            if not string.is_complete:
                return False
        self._held = self._held.lstrip()
        if self._held[:1] in ("'", '"'):
            quote = quote_at(self._held, 0)
            if quote:
                self._string, self._held = PythonString(quote), self._held[len(quote) :]
            return bool(quote)
        if self._held:
            self._teller.more('"', parsed)
            self._string, self._key = None, ""
        return bool(self._held)


class _ListedCalls(CallsInText):
    """Calls one after the other between an opening and `CLOSE`; text, if what comes first is no call."""

    CLOSE: str

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        super().__init__(names, most)
        self._opening = ""  # of the list that is being read
        self._has_called = False  # in it
        self._arguments: _Arguments | None = None

    def finish(self) -> Parsed:
        """See `ToolParser`; what is held of a call that was cut off is part of an argument."""
        parsed = Parsed()
        if self._arguments is None:
            if self._opening and not self._has_called:
                self._add_text(self._opening, parsed)
            elif self._opening and self.CLOSE.startswith(self._held.lstrip(_SEPARATORS)):
                self._held = ""
            self._add_text(self._held, parsed)
        self._held = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        if self._arguments is not None:
            rest = self._arguments.feed(self._held, parsed)
            self._held = rest or ""
            if rest is None:
                return False
            self._arguments, self._has_called = None, True
        if self._opening:
            return self._read_element(parsed)
        return self._read_text(parsed)

    @abstractmethod
    def _read_text(self, parsed: Parsed) -> bool:
        """What comes before a list, up to behind its opening."""

    def _read_element(self, parsed: Parsed) -> bool:
        """The next call as far as its arguments, or the end of the list; whether it is known which."""
        following = self._held.lstrip(_SEPARATORS if self._has_called else None)
        head = _HEAD.match(following)
        if head is not None and head[1] in self._teller.names:
            self._teller.begin(head[1], "", parsed)
            self._arguments, self._held = _Arguments(self._teller), following[head.end() :]
            return True
        if self._has_called and following.startswith(self.CLOSE):
            self._leave(following[len(self.CLOSE) :], parsed)
            return True
        may_be_close = self._has_called and self.CLOSE.startswith(following)
        if head is None and (not following or may_be_close or _MAY_BE_HEAD.fullmatch(following)):
            return False
        self._leave(self._held, parsed)
        return True

    def _leave(self, rest: str, parsed: Parsed) -> None:
        """Go on behind the list, or with what was taken for one."""
        if not self._has_called:
            self._add_text(self._opening, parsed)
        self._skips_space = self._has_called
        self._opening, self._held, self._has_called = "", rest, False


class PythonCalls(_ListedCalls):
    """An answer that is nothing but a list of calls, `[name(key=value, ...), ...]`, as ToolACE writes.

    Text that begins in any other way is text, and so is what follows the list.
    """

    CLOSE = "]"
    markers: tuple[str, ...] = ()

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        super().__init__(names, most)
        self._is_text = False

    def _read_text(self, parsed: Parsed) -> bool:
        following = self._held.lstrip()
        if not self._is_text and following.startswith("["):
            size = len(self._held) - len(following) + 1
            self._opening, self._held, self._is_text = self._held[:size], self._held[size:], True
            return True
        if following or self._is_text:
            self._is_text = True
            self._add_text(self._held, parsed)
            self._held = ""
        return False


class OlmoCalls(_ListedCalls):
    """`<function_calls>name(key=value, ...)</function_calls>` in a text, each on a line, as OLMo 3 writes."""

    OPEN, CLOSE = "<function_calls>", "</function_calls>"
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def _read_text(self, parsed: Parsed) -> bool:
        if not self._find(self.OPEN, parsed):
            return False
        self._opening = self.OPEN
        return True


def written_python_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """A call as such models write it, without what it stands in; arguments that are no object as they are."""
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{name}({arguments})"
