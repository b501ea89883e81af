"""Calls of tools as Mistral's models write them."""

from __future__ import annotations

import re
from collections.abc import Collection

from deployments.call_objects import Arguments, CallObjects
from deployments.tool_calls import FUNCTION_NAME, CallsInText, Parsed, mistral_id

# The name of a function, and perhaps the call's id; then its arguments, an object, begin.
_HEAD = re.compile(rf"\s{{0,8}}({FUNCTION_NAME})\s{{0,8}}(?:\[CALL_ID\][^\[]{{0,64}})?(?:\[ARGS\])?\s{{0,8}}")
_LONGEST_HEAD = 256


class MistralCalls(CallsInText):
    """Calls after `[TOOL_CALLS]`, with text before them, in either form that Mistral's tokenizers have.

    Until version 7 a list, `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`; from version 11 on
    each by itself, `[TOOL_CALLS]name{...}` or `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`.
    """

    OPEN = "[TOOL_CALLS]"
    markers: tuple[str, ...] = (OPEN, "[CALL_ID]", "[ARGS]")

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        super().__init__(names, most, mistral_id)
        self._is_inside = False  # behind the marker, where it is not known yet what follows
        self._objects: CallObjects | None = None
        self._arguments: Arguments | None = None

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        parsed = Parsed()
        while self._objects is not None:
            self._objects.finish(parsed)
            self._leave(self._objects, parsed)
            self._take(parsed)
        if self._arguments is not None:
            self._arguments.finish(parsed)
        elif self._is_inside:
            self._add_text(self.OPEN, parsed)
        self._add_text(self._held, parsed)
        self._held = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        if self._objects is not None:
            fed, self._held = self._held, ""
            if not self._objects.feed(fed, parsed):
                return False
            self._leave(self._objects, parsed)
        elif self._arguments is not None:
            rest = self._arguments.feed(self._held, parsed)
            self._held = rest or ""
            if rest is None:
                return False
            self._arguments, self._skips_space = None, True
        if self._is_inside:
            return self._read_head(parsed)
        self._is_inside = self._find(self.OPEN, parsed)
        return self._is_inside

    def _leave(self, objects: CallObjects, parsed: Parsed) -> None:
        """Go on behind the calls; what is none is looked at again, as another marker may follow in it."""
        self._objects, self._held = None, objects.rest or ""
        if objects.is_certain:
            self._skips_space = True
        else:
            self._add_text(self.OPEN, parsed)

    def _read_head(self, parsed: Parsed) -> bool:
        """Find out what follows the marker; whether that is known."""
        following = self._held.lstrip()
        if not following:
            return False
        start = self._held.find("{", 0, _LONGEST_HEAD)
        if following[0] in "[{":
            self._objects = CallObjects(self._teller, stop=self.OPEN)
        elif start < 0 and len(self._held) < _LONGEST_HEAD:
            return False
        else:
            head = _HEAD.fullmatch(self._held[:start]) if start >= 0 else None
            if head is None or head[1] not in self._teller.names:
                self._add_text(self.OPEN, parsed)
            else:
                self._teller.begin(head[1], "", parsed)
                self._arguments, self._held = Arguments(self._teller, self.OPEN), self._held[start:]
        self._is_inside = False
        return True
