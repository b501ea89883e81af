"""Calls of tools as Gemma 4 writes them: arguments in a notation of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from deployments.headed_calls import HeadedCalls
from deployments.json_extent import JsonExtent
from deployments.tool_calls import DECODER, FUNCTION_NAME, Parsed, Teller, json_text, overlap

#: What stands around a string, in which nothing is escaped.
QUOTE = '<|"|>'

_KEY = re.compile(
    rf'(?:{re.escape(QUOTE)}(.*?){re.escape(QUOTE)}|"([^"]*)"|([^,:\[\]{{}}"<]+))\s*:', re.DOTALL
)
_SCALAR = re.compile(r"[^,\[\]{}]+(?=[,\[\]{}])")
_LONGEST = 1024  # of what is held until it is known what it is
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def written_gemma_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """A call as Gemma 4 writes it; arguments that are no object stand as they are."""
    written = arguments if isinstance(arguments, str) else _written(arguments)
    return f"{GemmaCalls.CALL}call:{name}{written}{GemmaCalls.CALL_END}"


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_written(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return json_text(value)


class GemmaCalls(HeadedCalls):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>` in a text."""

    CALL, CALL_END = "<|tool_call>", "<tool_call|>"
    HEAD = re.compile(rf"\s*call:\s*({FUNCTION_NAME})\s*")
    markers: tuple[str, ...] = (CALL, CALL_END, QUOTE)

    def _make_arguments(self) -> _Arguments:
        return _Arguments(self._teller, self.CALL_END)


class _Arguments:
    """Arguments of a call, told as JSON while they are written; broken ones as they are, as far as `stop`."""

    def __init__(self, teller: Teller, stop: str) -> None:
        self._teller = teller
        self._stop = stop
        self._held = ""
        self._closers: list[str] = []  # of what has begun
        self._expected = "value"  # or "key", or "comma"
        self._separator = ""  # due with the next key or value
        self._in_string = self._is_broken = False
        self._json: JsonExtent | None = None  # of a string with JSON's quotes

    def feed(self, text: str, parsed: Parsed) -> str | None:
        """See `ArgumentReader`."""
        self._held += text
        while not self._is_broken and self._advance(parsed):
            if self._expected == "comma" and not self._closers:
                return self._held
        if self._is_broken:
            self._begin("", 0, parsed)
            at = self._held.find(self._stop)
            if at >= 0:
                self._teller.more(self._held[:at], parsed)
                return self._held[at:]
            self._tell_held(len(self._held) - overlap(self._held, self._stop), parsed)
        return None

    def finish(self, parsed: Parsed) -> None:
        """See `ArgumentReader`; what is held of others is (the beginning of) a value, or of a mark."""
        if self._is_broken:
            self._teller.more(self._held, parsed)

    def _advance(self, parsed: Parsed) -> bool:
        """Read what can be read next; whether there may be more."""
        if self._in_string:
            return self._go_on_in_string(parsed)
        if self._json is not None:
            self._begin("", 0, parsed)
            self._tell_held(self._json.feed(self._held), parsed)
            if not self._json.is_complete:
                return False
            self._json = None
        self._held = self._held.lstrip()
        if not self._held or (len(self._held) < len(QUOTE) and QUOTE.startswith(self._held)):
            return False
        if self._closers and self._held.startswith(self._closers[-1]):
            self._separator = ""  # some models write one behind the last element
            self._begin(self._closers.pop(), 1, parsed)
            self._expected = "comma"
            return True
        if self._expected == "key":
            return self._read_key(parsed)
        if self._expected == "value":
            return self._read_value(parsed)
        if self._held.startswith(","):
            self._separator, self._held = ", ", self._held[1:]
            self._expected = "key" if self._closers[-1] == "}" else "value"
        else:
            self._is_broken = True
        return not self._is_broken

    def _read_key(self, parsed: Parsed) -> bool:
        match = _KEY.match(self._held)
        if match is not None:
            key = next((group for group in match.groups() if group is not None), "")
            self._begin(f"{json.dumps(key.strip(), ensure_ascii=False)}: ", match.end(), parsed)
            self._expected = "value"
            return True
        self._is_broken = len(self._held) > _LONGEST or self._held[0] in ",:[]{}"
        return False

    def _read_value(self, parsed: Parsed) -> bool:
        first = self._held[0]
        if first in "{[":
            self._begin(first, 1, parsed)
            self._closers.append("}" if first == "{" else "]")
            self._expected = "key" if first == "{" else "value"
            return True
        self._expected = "comma"
        if self._held.startswith(QUOTE):
            self._begin('"', len(QUOTE), parsed)
            self._in_string = True
            return True
        if first == '"':
            self._json = JsonExtent()
            return True
        match = _SCALAR.match(self._held)
        if match is not None:
            self._begin(_value_text(match[0].strip()), match.end(), parsed)
            return True
        self._expected = "value"
        self._is_broken = first in ",]}" or len(self._held) > _LONGEST
        return False

    def _go_on_in_string(self, parsed: Parsed) -> bool:
        at = self._held.find(QUOTE)
        is_whole = at >= 0
        if not is_whole:
            at = len(self._held) - overlap(self._held, QUOTE)
        self._teller.more(json_text(self._held[:at])[1:-1], parsed)
        self._held = self._held[at:]
        if is_whole:
            self._held = self._held[len(QUOTE) :]
            self._teller.more('"', parsed)
            self._in_string = False
        return is_whole

    def _begin(self, told: str, size: int, parsed: Parsed) -> None:
        """Tell what the first characters of what is held say."""
        self._teller.more(self._separator + told, parsed)
        self._separator, self._held = "", self._held[size:]

    def _tell_held(self, size: int, parsed: Parsed) -> None:
        self._teller.more(self._held[:size], parsed)
        self._held = self._held[size:]


def _value_text(written: str) -> str:
    """A value without marks as JSON, a string unless it is anything else."""
    try:
        return json_text(DECODER.decode(written))
    except (ValueError, RecursionError):
        return _PYTHON.get(written, json_text(written))
