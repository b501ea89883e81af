"""Calls of tools as Qwen3-Coder models write them: with the arguments in tags instead of JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deployments.tagged_calls import TaggedCalls
from deployments.tagged_values import Schemas
from deployments.tool_calls import LONGEST_NAME, Parsed, json_text

_BEFORE_FUNCTION = re.compile(r"(?:<tool_call>\s*)?")


def written_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """A call as these models write it; arguments that are no object stand as they are."""
    lines = ["<tool_call>", f"<function={name}>"]
    if isinstance(arguments, str):
        lines.append(arguments)
        arguments = {}
    for key, value in arguments.items():
        lines += [f"<parameter={key}>", value if isinstance(value, str) else json_text(value), "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


class QwenCoderCalls(TaggedCalls):
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>` in a text.

    Each tag is on a line of its own, and the line breaks around a value are none of it. As with vLLM, models
    may forget `<tool_call>`, `</parameter>`, and `</function>` if `</tool_call>` or the next call follows.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    FUNCTION, FUNCTION_END = "<function=", "</function>"
    PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
    markers: tuple[str, ...] = (OPEN, CLOSE)

    # What ends a value; the line break before belongs to the form.
    _ENDS = (f"\n{PARAMETER_END}", PARAMETER_END, f"\n{PARAMETER}", f"\n{FUNCTION_END}")

    def __init__(self, schemas: Schemas, most: int | None = None) -> None:
        """See `TaggedCalls`."""
        super().__init__(schemas, most)
        self._began = False  # whether any of the argument was read
        self._may_close = False

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        if self._may_close:
            self._held = ""
        return super().finish()

    def _read_text(self, parsed: Parsed) -> bool:
        if self._may_close:
            self._may_close = not self._skip_closing(self.CLOSE)
            return not self._may_close
        return self._find_call((self.OPEN, self.FUNCTION), parsed)

    def _head(self) -> tuple[str | None, int]:
        match = _BEFORE_FUNCTION.match(self._held)
        assert match is not None  # it may be empty
        head = self._held[match.end() :]
        if not head.startswith(self.FUNCTION):
            return (None if self.FUNCTION.startswith(head) else ""), 0
        name, closed, after = head[len(self.FUNCTION) :].partition(">")
        if not closed:
            return (None if len(name) <= LONGEST_NAME else ""), 0
        if name not in self._schemas:
            return "", 0
        following = after.lstrip()
        for marker in (self.PARAMETER, self.FUNCTION_END):
            if following.startswith(marker):
                return name, len(self._held) - len(following)
            if marker.startswith(following):
                return None, 0
        return "", 0

    def _read_function(self, parsed: Parsed) -> bool:
        at, marker = self._first((self.PARAMETER, self.FUNCTION_END, self.CLOSE, self.OPEN, self.FUNCTION))
        self._held = self._held[at:]
        if not marker:
            return False
        if marker == self.PARAMETER:
            key, closed, after = self._held[len(marker) :].partition(">")
            if not closed:
                return False
            self._began, self._held = False, after
            self._begin_argument(key, parsed)
            return True
        self._end_call(parsed)
        self._held = self._held.removeprefix(self.FUNCTION_END)
        self._may_close = True
        return True

    def _read_value(self, parsed: Parsed) -> bool:
        if not self._held:
            return False
        if not self._began:
            self._began, self._held = True, self._held.removeprefix("\n")
        if not self._more_value(self._ENDS, parsed):
            return False
        self._held = self._held.removeprefix("\n").removeprefix(self.PARAMETER_END)
        return True
