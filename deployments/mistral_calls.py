"""Calls of tools as Mistral's models write them."""

from __future__ import annotations

import re

from deployments.tool_calls import (
    DECODER,
    CallsInText,
    Parsed,
    json_text,
    mistral_id,
    overlap,
    read_calls,
)

# The name of a function, and perhaps the call's id; then its arguments, an object, begin.
_HEAD = re.compile(r"\s{0,8}([a-zA-Z0-9_.-]{1,64})\s{0,8}(?:\[CALL_ID\][^\[]{0,64})?(?:\[ARGS\])?\s{0,8}")
_LONGEST_HEAD = 256

Calls = list[tuple[str, str]]


class MistralCalls(CallsInText):
    """Calls after `[TOOL_CALLS]`, with text before them, in either form that Mistral's tokenizers have.

    Until version 7 a list, `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`; from version 11 on
    each by itself, `[TOOL_CALLS]name{...}` or `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`.
    """

    OPEN = "[TOOL_CALLS]"
    markers: tuple[str, ...] = (OPEN, "[CALL_ID]", "[ARGS]")

    def feed(self, text: str) -> Parsed:
        """See `ToolParser`."""
        self._held += text
        parsed = Parsed()
        while self._advance(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """See `ToolParser`; a call that was cut off is text."""
        parsed = Parsed()
        held, self._held = self._held, ""
        self._add_text(self.OPEN + held if self._is_inside else held, parsed)
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        """Take what is certain out of what is held; whether there may be more of it."""
        if not self._is_inside:
            before, found, after = self._held.partition(self.OPEN)
            if found:
                self._add_text(before, parsed)
                self._held, self._is_inside = after, True
                return True
            kept = overlap(self._held, self.OPEN)
            self._add_text(self._held[: len(self._held) - kept], parsed)
            self._held = self._held[len(self._held) - kept :]
            return False
        try:
            read = self._read()
        except _Incomplete:
            return False
        self._is_inside = False
        if read is None:  # looked at again without its marker, for another one may follow in it
            self._add_text(self.OPEN, parsed)
            return True
        calls, self._held = read
        self._add_calls(calls, parsed, mistral_id)
        return True

    def _read(self) -> tuple[Calls, str] | None:
        """The calls that what is held begins with, and the rest; None if it does not.

        Raises:
            _Incomplete: if that is not known yet.
        """
        text = self._held.lstrip()
        if not text:
            raise _Incomplete
        if text[0] in "[{":
            found = _value_in(text)
            calls = None if found is None else read_calls(found[0], self._names, ("arguments", "parameters"))
            return None if found is None or calls is None else (calls, found[1])
        start = self._held.find("{", 0, _LONGEST_HEAD)
        if start < 0:
            if len(self._held) < _LONGEST_HEAD:
                raise _Incomplete
            return None
        head = _HEAD.fullmatch(self._held[:start])
        if head is None or head[1] not in self._names:
            return None
        found = _value_in(self._held[start:])
        return None if found is None else ([(head[1], json_text(found[0]))], found[1])


class _Incomplete(Exception):
    """More text must come."""


def _value_in(text: str) -> tuple[object, str] | None:
    """The JSON value that a text begins with, and the rest; None for one nested as no call is.

    Raises:
        _Incomplete: as long as it is not a whole one.
    """
    try:
        value, end = DECODER.raw_decode(text)
    except ValueError:
        raise _Incomplete from None
    except RecursionError:
        return None
    return value, text[end:]
