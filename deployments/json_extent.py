"""How far a JSON value goes in text that arrives in pieces."""

from __future__ import annotations

import re

_SPACE = " \t\r\n"
_CLOSED_BY = {"{": "}", "[": "]"}
# Up to the quote that ends a string, or a backslash whose other half has not come.
_IN_STRING = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


class JsonExtent:
    """Follows one JSON value, however it is cut, without keeping any of it.

    What is wrong within a string, as a line break, does not change where it ends and goes unnoticed.

    Attributes:
        is_complete: whether the value has ended; a number only does with what comes after it.
        is_broken: whether what came is no beginning of a value.
        is_nested: whether an object or a list within the value has begun.
    """

    def __init__(self, *, in_object: bool = False) -> None:
        """Of a value, or of what is left of an object behind one of its values (`in_object`)."""
        self.is_complete = self.is_broken = self.is_nested = False
        self._closers = ["}"] if in_object else []
        # What may come: "value" or "key", "colon", "comma"; and behind them a bracket that may close at once.
        self._expected = "comma" if in_object else "value"
        self._in_string = self._is_escaped = False
        self._scalar = ""

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the value: all, unless it is complete or broken."""
        at = 0
        while at < len(text) and not (self.is_complete or self.is_broken):
            if self._in_string:
                at = self._go_on_in_string(text, at)
            elif self._scalar:
                at = self._go_on_in_scalar(text, at)
            elif self._takes(text[at]):
                at += 1
            else:
                self.is_broken = True
        return at

    def _go_on_in_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        match = _IN_STRING.match(text, at)
        assert match is not None  # it may be empty
        at = match.end()
        if at < len(text):
            if text[at] == '"':
                self._in_string = False
                if self._expected == "comma":  # and no key
                    self._end_value()
            else:
                self._is_escaped = True
            at += 1
        return at

    def _go_on_in_scalar(self, text: str, at: int) -> int:
        match = _IN_SCALAR.match(text, at)
        if match is not None:
            self._scalar += match[0]
            return match.end()
        if _SCALAR.fullmatch(self._scalar) is None:
            self.is_broken = True
        self._scalar = ""
        self._end_value()
        return at

    def _takes(self, char: str) -> bool:
        """Whether the value can go on with `char`, and then it does."""
        expected = self._expected
        if char in _SPACE:
            return True
        if char == '"' and expected.startswith(("value", "key")):
            self._in_string = True
            self._expected = "colon" if expected.startswith("key") else "comma"
        elif char in "{[" and expected.startswith("value"):
            self.is_nested |= bool(self._closers)
            self._closers.append(_CLOSED_BY[char])
            self._expected = "key}" if char == "{" else "value]"
        elif char in "-0123456789tfn" and expected.startswith("value"):
            self._scalar = char
        elif char == ":" and expected == "colon":
            self._expected = "value"
        elif char == "," and expected == "comma":
            self._expected = "key" if self._closers[-1] == "}" else "value"
        elif self._closers and char == self._closers[-1] and (expected == "comma" or expected.endswith(char)):
            self._closers.pop()
            self._end_value()
        else:
            return False
        return True

    def _end_value(self) -> None:
        self._expected = "comma"
        self.is_complete = not self._closers and not self.is_broken
