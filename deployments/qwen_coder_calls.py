"""Calls of tools with a tag for the function, and one with each argument, as Qwen3-Coder writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deployments.tagged_calls import TaggedCalls
from deployments.tagged_values import Schemas
from deployments.tool_calls import LONGEST_NAME, Parsed, json_text


class QwenCoderCalls(TaggedCalls):
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>` in a text.

    Each tag is on a line of its own, and the line breaks around a value are none of it. As with vLLM, models
    may forget `<tool_call>`, `</parameter>`, and `</function>` if `</tool_call>` or the next call follows.

    Attributes:
        NAME_END: what ends the name of a function or argument, and its tag.
        AROUND_VALUE: what stands around values, besides the tags.
    """

    OPEN: ClassVar[str] = "<tool_call>"
    CLOSE: ClassVar[str] = "</tool_call>"
    FUNCTION: ClassVar[str] = "<function="
    FUNCTION_END: ClassVar[str] = "</function>"
    PARAMETER: ClassVar[str] = "<parameter="
    PARAMETER_END: ClassVar[str] = "</parameter>"
    NAME_END: ClassVar[str] = ">"
    AROUND_VALUE: ClassVar[str] = "\n"
    markers: tuple[str, ...] = (OPEN, CLOSE)

    @classmethod
    def written(cls, name: str, arguments: Mapping[str, Any] | str) -> str:
        """A call as such models write it; arguments that are no object stand as they are."""
        lines = [cls.OPEN, f"{cls.FUNCTION}{name}{cls.NAME_END}"]
        if isinstance(arguments, str):
            lines.append(arguments)
            arguments = {}
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json_text(value)
            tag = f"{cls.PARAMETER}{key}{cls.NAME_END}"
            lines.append(f"{tag}{cls.AROUND_VALUE}{text}{cls.AROUND_VALUE}{cls.PARAMETER_END}")
        return "\n".join([*lines, cls.FUNCTION_END, cls.CLOSE])

    def __init__(self, schemas: Schemas, most: int | None = None) -> None:
        """See `TaggedCalls`."""
        super().__init__(schemas, most)
        # What ends a value; the line break before belongs to the form.
        ends = (self.PARAMETER_END, f"\n{self.PARAMETER}", f"\n{self.FUNCTION_END}")
        self._ends = (self.AROUND_VALUE + self.PARAMETER_END, *ends)
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
        head = self._held
        if head.startswith(self.OPEN):
            head = head[len(self.OPEN) :].lstrip()
        if not head.startswith(self.FUNCTION):
            return (None if self.FUNCTION.startswith(head) else ""), 0
        name, closed, after = head[len(self.FUNCTION) :].partition(self.NAME_END)
        if not closed:
            return (None if len(name) < LONGEST_NAME + len(self.NAME_END) else ""), 0
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
            key, closed, after = self._held[len(marker) :].partition(self.NAME_END)
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
            self._began, self._held = True, self._held.removeprefix(self.AROUND_VALUE)
        if not self._more_value(self._ends, parsed):
            return False
        self._held = self._held.removeprefix("\n").removeprefix(self.PARAMETER_END)
        return True


class SeedCalls(QwenCoderCalls):
    """The same in `<seed:tool_call>`, and values without line breaks around, as Seed-OSS writes."""

    OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
    AROUND_VALUE = ""
    markers = (OPEN, CLOSE)


class MiniMaxCalls(QwenCoderCalls):
    """`<invoke name="name"><parameter name="key">value</parameter>...</invoke>`, as MiniMax-M2 writes.

    `<minimax:tool_call>` and its end stand around all calls.
    """

    OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
    FUNCTION, FUNCTION_END = '<invoke name="', "</invoke>"
    PARAMETER = '<parameter name="'
    NAME_END = '">'
    AROUND_VALUE = ""
    markers = (OPEN, CLOSE)
