"""Calls of tools as GLM models write them since 4.5: keys and values in tags of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.tagged_calls import TaggedCalls
from deployments.tool_calls import LONGEST_NAME, Parsed, json_text


def written_glm_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """A call as these models write it; arguments that are no object stand as they are."""
    lines = [f"<tool_call>{name}"]
    if isinstance(arguments, str):
        lines.append(arguments)
        arguments = {}
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json_text(value)
        lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{text}</arg_value>"]
    return "\n".join([*lines, "</tool_call>"])


class GlmCalls(TaggedCalls):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>` in a text.

    There may be line breaks between the tags (GLM-4.5 and 4.6) or none (4.7); within a value they belong to
    it. Models may forget `</tool_call>` if the next call follows.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    KEY, KEY_END = "<arg_key>", "</arg_key>"
    VALUE, VALUE_END = "<arg_value>", "</arg_value>"
    markers: tuple[str, ...] = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

    def _read_text(self, parsed: Parsed) -> bool:
        return self._find_call((self.OPEN,), parsed)

    def _head(self) -> tuple[str | None, int]:
        written, opened, after = self._held[len(self.OPEN) :].partition("<")
        name = written.strip()
        if not opened:
            return (None if len(name) <= LONGEST_NAME else ""), 0
        if name not in self._schemas:
            return "", 0
        for marker in (self.KEY, self.CLOSE):
            if (opened + after).startswith(marker):
                return name, len(self.OPEN) + len(written)
            if marker.startswith(opened + after):
                return None, 0
        return "", 0

    def _read_function(self, parsed: Parsed) -> bool:
        at, marker = self._first((self.KEY, self.CLOSE, self.OPEN))
        self._held = self._held[at:]
        if not marker:
            return False
        if marker == self.KEY:
            at, marker = self._first((self.VALUE, self.CLOSE, self.OPEN))
            if not marker:
                return False
            key, self._held = self._held[len(self.KEY) : at], self._held[at:]
            if marker == self.VALUE:
                self._held = self._held[len(self.VALUE) :]
                self._begin_argument(key.partition(self.KEY_END)[0], parsed)
            return True
        self._end_call(parsed)
        self._held = self._held.removeprefix(self.CLOSE)
        return True

    def _read_value(self, parsed: Parsed) -> bool:
        if not self._more_value((self.VALUE_END,), parsed):
            return False
        self._held = self._held.removeprefix(self.VALUE_END)
        return True
