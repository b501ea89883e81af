"""Calls of tools as Qwen3-Coder models write them: with the arguments in tags instead of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.tagged_values import Schemas, types_of, value_text
from deployments.tool_calls import LONGEST_NAME, CallsInText, Parsed, json_text, overlap

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


class QwenCoderCalls(CallsInText):
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>` in a text.

    Each tag is on a line of its own. A value is a string as it stands, without the line breaks around it,
    unless the function's schema has other types for it, and it reads as one of those. Strings are told as
    they are written, other values when they are complete. As with vLLM, models may forget `<tool_call>`,
    `</parameter>`, and `</function>` if `</tool_call>` or the next call follows.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    FUNCTION, FUNCTION_END = "<function=", "</function>"
    PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
    markers: tuple[str, ...] = (OPEN, CLOSE)

    # What ends a value; the line break before belongs to the form.
    _ENDS = (f"\n{PARAMETER_END}", PARAMETER_END, f"\n{PARAMETER}", f"\n{FUNCTION_END}")

    def __init__(self, schemas: Schemas, most: int | None = None) -> None:
        """Of the functions that have a schema, or None, there."""
        super().__init__(schemas, most)
        self._schemas = schemas
        self._function = ""  # of the call that is being read
        self._is_in_value = False  # of one of its arguments
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # unless it is a string, for that is told at once
        self._began = False  # whether any of that argument was read
        self._num_arguments = 0
        self._may_close = False

    def finish(self) -> Parsed:
        """See `ToolParser`; what is held of a call that was cut off is (the beginning of) a tag."""
        parsed = Parsed()
        if not self._function and not self._may_close:
            self._add_text(self._held, parsed)
        self._held = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        if self._is_in_value:
            return self._read_value(parsed)
        if self._function:
            return self._read_function(parsed)
        if self._may_close:
            self._may_close = not self._skip_closing(self.CLOSE)
            return not self._may_close
        return self._read_text(parsed)

    def _read_text(self, parsed: Parsed) -> bool:
        """What comes before a call, and how that begins."""
        at, marker = self._first((self.OPEN, self.FUNCTION))
        self._add_text(self._held[:at], parsed)
        self._held = self._held[at:]
        if not marker:
            return False
        name, size = self._head()
        if name is None:
            return False
        if name:
            self._teller.begin(name, "", parsed)
            self._function, self._num_arguments = name, 0
        else:  # looked at again, as a call may follow in it
            size = len(marker)
            self._add_text(marker, parsed)
        self._held = self._held[size:]
        return True

    def _head(self) -> tuple[str | None, int]:
        """The name of the function that what is held begins to call, and where its arguments begin.

        The name is empty if that is no call, and None as long as it is not known.
        """
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
        """How the next argument begins, or the call ends; what else stands between arguments says nothing."""
        at, marker = self._first((self.PARAMETER, self.FUNCTION_END, self.CLOSE, self.OPEN, self.FUNCTION))
        self._held = self._held[at:]
        if not marker:
            return False
        if marker == self.PARAMETER:
            key, closed, after = self._held[len(marker) :].partition(">")
            if not closed:
                return False
            self._is_in_value, self._began, self._value = True, False, []
            self._types = types_of(self._schemas[self._function], key)
            self._held = after
            opening = "{" if not self._num_arguments else ", "
            quote = '"' if self._types == {"string"} else ""
            self._teller.more(f"{opening}{json.dumps(key, ensure_ascii=False)}: {quote}", parsed)
            self._num_arguments += 1
            return True
        self._teller.more("}" if self._num_arguments else "{}", parsed)
        self._held = self._held.removeprefix(self.FUNCTION_END)
        self._function, self._may_close, self._skips_space = "", True, True
        return True

    def _read_value(self, parsed: Parsed) -> bool:
        """An argument, or more of it."""
        if not self._held:
            return False
        if not self._began:
            self._began, self._held = True, self._held.removeprefix("\n")
        at, marker = self._first(self._ENDS)
        value, self._held = self._held[:at], self._held[at:]
        is_string = self._types == {"string"}
        if is_string:
            self._teller.more(json.dumps(value, ensure_ascii=False)[1:-1], parsed)
        else:
            self._value.append(value)
        if not marker:
            return False
        self._teller.more('"' if is_string else value_text("".join(self._value), self._types), parsed)
        self._held = self._held.removeprefix("\n").removeprefix(self.PARAMETER_END)
        self._is_in_value = False
        return True

    def _first(self, markers: Sequence[str]) -> tuple[int, str]:
        """Where the first of some markers is in what is held, and which; none if at most its beginning is."""
        found = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        if found:
            return min(found)
        return len(self._held) - max(overlap(self._held, marker) for marker in markers), ""
