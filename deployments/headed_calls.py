"""What parsers of calls have in common that begin with a marker and the function's name."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Protocol

from deployments.call_objects import Arguments
from deployments.tool_calls import CallsInText, NewId, Parsed, openai_id

_LONGEST_HEAD = 256


class ArgumentReader(Protocol):
    """Reads the arguments of a call that is told already, and tells them as JSON."""

    def feed(self, text: str, parsed: Parsed) -> str | None:
        """What follows them, once that is known."""
        ...

    def finish(self, parsed: Parsed) -> None:
        """No more text comes."""
        ...


class HeadedCalls(CallsInText):
    """`CALL`, a head with the function's name, arguments that begin with a bracket, `CALL_END`; in a text.

    Models may leave `CALL_END` out, and the markers around all calls, if there are such. Where no call
    follows, the text is looked at again, as there may be one in it.

    Attributes:
        OPEN, CLOSE: what stands around all calls; empty if that is nothing.
        CALL, CALL_END: what stands around each.
        HEAD: what stands between `CALL` and the arguments; its first group that matches is the name.
    """

    OPEN: str = ""
    CLOSE: str = ""
    CALL: str
    CALL_END: str
    HEAD: re.Pattern[str]
    markers: tuple[str, ...]

    def __init__(self, names: Collection[str], most: int | None = None, new_id: NewId = openai_id) -> None:
        super().__init__(names, most, new_id)
        self._opening = ""  # up to the head that is being read
        self._arguments: ArgumentReader | None = None
        self._is_behind = False  # arguments, before the end of their call
        self._may_close = False

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        parsed = Parsed()
        if self._arguments is not None:
            self._arguments.finish(parsed)
        elif not (self._is_behind or self._may_close):
            self._add_text(self._opening + self._held, parsed)
        self._held = ""
        return parsed

    def _make_arguments(self) -> ArgumentReader:
        """The reader of a call's arguments, from their bracket on."""
        return Arguments(self._teller, self.CALL_END)

    def _call_id(self, head: str) -> str:
        """The id of a call that is a part of its head; empty if models write none."""
        return ""

    def _advance(self, parsed: Parsed) -> bool:
        if self._arguments is not None:
            rest = self._arguments.feed(self._held, parsed)
            self._held = rest or ""
            if rest is None:
                return False
            self._arguments, self._is_behind, self._skips_space = None, True, True
        if self._is_behind:
            return self._skip_end()
        if self._opening:
            return self._read_head(parsed)
        if self._may_close:
            self._may_close = not self._skip_closing(self.CLOSE)
            if self._may_close:
                return False
        return self._read_text(parsed)

    def _read_text(self, parsed: Parsed) -> bool:
        """Up to behind the marker of a call."""
        at, marker = self._first([marker for marker in (self.OPEN, self.CALL) if marker])
        self._add_text(self._held[:at], parsed)
        self._held = self._held[at:]
        if not marker:
            return False
        size = len(marker)
        if marker == self.OPEN:
            following = self._held[size:].lstrip()
            if len(following) < len(self.CALL) and self.CALL.startswith(following):
                return False
            if not following.startswith(self.CALL):
                self._add_text(marker, parsed)
                self._held = self._held[size:]
                return True
            size = len(self._held) - len(following) + len(self.CALL)
        self._opening, self._held = self._held[:size], self._held[size:]
        return True

    def _read_head(self, parsed: Parsed) -> bool:
        """Find out whether a call follows its marker; whether that is known."""
        start = self._held.find("{", 0, _LONGEST_HEAD)
        if start < 0 and len(self._held) < _LONGEST_HEAD:
            return False
        head = self.HEAD.fullmatch(self._held[:start]) if start >= 0 else None
        name = next(filter(None, head.groups()), "") if head is not None else ""
        if name in self._teller.names:
            self._teller.begin(name, "", parsed, self._call_id(head[0]) if head is not None else "")
            self._arguments, self._held = self._make_arguments(), self._held[start:]
        else:
            self._add_text(self._opening, parsed)
        self._opening = ""
        return True

    def _skip_end(self) -> bool:
        """Leave out the end of a call, and what its arguments stand in; whether it is there."""
        marks = [marker for marker in (self.CALL_END, self.CLOSE, self.OPEN, self.CALL) if marker]
        at, marker = self._first(marks)
        self._held = self._held[at:].removeprefix(self.CALL_END)
        if not marker:
            return False
        self._is_behind, self._may_close = False, True
        return True
