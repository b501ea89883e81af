"""Values that models write as Python does: how far one goes, and what it is in JSON."""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import Any

from deployments.tool_calls import DECODER, json_text

_OPENING, _CLOSING = "([{", ")]}"
# Up to a quote, or a backslash whose other half has not come.
_IN_STRING = re.compile(r"""(?:[^"'\\]+|\\.)+""", re.DOTALL)
_UNQUOTED = re.compile(r"""[^"'\\]+""")
_ESCAPE = re.compile(
    r"\\(?:[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[A-Za-z0-9 -]*\}|[^0-7xuUN])",
    re.DOTALL,
)
_LONGEST_ESCAPE = 100  # of names of characters
_PLAIN = re.compile(r"""[^"'()\[\]{},]+""")


class PythonExtent:
    """Follows one argument of a call, however it is cut, as far as the comma or bracket behind it.

    Attributes:
        is_complete: whether the argument has ended.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._quote = ""  # of the string it is in

    def feed(self, text: str, at: int) -> int:
        """Where in `text`, which has been followed up to `at`, what is known of the argument ends."""
        while at < len(text) and not self.is_complete:
            if text[at] in "\"'":
                quote = self._quote or quote_at(text, at)
                if not quote or (quote.startswith(text[at:]) and len(text) < at + len(quote)):
                    return at
                at = self._take_quote(text, at, quote)
            elif self._quote:
                match = _IN_STRING.match(text, at)
                if match is None:
                    return at
                at = match.end()
            elif (match := _PLAIN.match(text, at)) is not None:
                at = match.end()
            elif self._depth == 0 and text[at] in f",{_CLOSING}":
                self.is_complete = True
            else:
                self._depth += (text[at] in _OPENING) - (text[at] in _CLOSING)
                at += 1
        return at

    def _take_quote(self, text: str, at: int, quote: str) -> int:
        if not self._quote:
            self._quote = quote
        elif text.startswith(quote, at):
            self._quote = ""
        else:  # a quote of another kind, or fewer than end the string
            return at + 1
        return at + len(quote)


def quote_at(text: str, at: int) -> str:
    """The quote that begins a string there; none if it is not known yet whether it is one or three."""
    one = text[at]
    if text.startswith(3 * one, at):
        return 3 * one
    return "" if len(text) < at + 3 and text[at:] == (len(text) - at) * one else one


class PythonString:
    """Reads a string behind its opening quote, however it is cut.

    Attributes:
        is_complete: whether it has ended.
        rest: what follows it, once it has.
    """

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._held = ""
        self.is_complete = False
        self.rest = ""

    def feed(self, text: str) -> str:
        """What more text says."""
        held, at, said = self._held + text, 0, []
        while at < len(held):
            if held[at] == "\\":
                match = _ESCAPE.match(held, at)
                # Octal ones have up to three digits.
                if match is None or (match.end() == len(held) and held[at + 1] in "01234567"):
                    if len(held) < at + _LONGEST_ESCAPE:
                        break
                    said.append(held[at])
                    at += 1
                else:
                    said.append(_escaped(match[0]))
                    at = match.end()
            elif held.startswith(self._quote, at):
                self.is_complete, self.rest = True, held[at + len(self._quote) :]
                return "".join(said)
            elif self._quote.startswith(held[at:]):
                break
            else:
                match = _UNQUOTED.match(held, at)
                end = match.end() if match is not None else at + 1
                said.append(held[at:end])
                at = end
        self._held = held[at:]
        return "".join(said)


def _escaped(written: str) -> str:
    """What an escape says; the text itself if it says nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return str(ast.literal_eval(f'"""{written}"""'))
    except (SyntaxError, ValueError):  # behind a backslash may stand what no source may hold
        return written


def python_value_text(written: str) -> str:
    """A value as JSON: what it says in Python, or in JSON, else the text itself as a string."""
    written = written.strip()
    try:
        return json_text(DECODER.decode(written))
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # for escapes that are none, as in "\d"
            value = ast.literal_eval(written)
        return json_text(_for_json(value))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json_text(written)


def _for_json(value: Any) -> Any:
    """A literal's value in types of JSON's; raises ValueError for one that it has none for."""
    if isinstance(value, dict):
        return {_key(key): _for_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError(f"{value!r} is nothing that JSON can say")


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise ValueError(f"{key!r} is no key in JSON")
