"""Calls of tools that are JSON behind a marker: an object, or a list of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from deployments.call_objects import CallObjects
from deployments.tool_calls import CallsInText, Parsed, json_text


class MarkedCalls(CallsInText):
    """`OPEN {"name": ..., "arguments": {...}} CLOSE` in a text, or a list of such objects there.

    What is behind the marker and is no call is looked at again, as another one may follow in it; so models
    may speak of calls. Calls end with their last bracket: some models leave the closing marker out.
    """

    OPEN: ClassVar[str]
    CLOSE: ClassVar[str]
    NAME_KEY: ClassVar[Literal["name", "tool_name"]] = "name"
    markers: tuple[str, ...]

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        super().__init__(names, most)
        self._objects: CallObjects | None = None
        self._may_close = False

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        parsed = Parsed()
        while self._objects is not None:
            self._objects.finish(parsed)
            self._leave(self._objects, parsed)
            self._take(parsed)
        if not self._may_close:
            self._add_text(self._held, parsed)
        self._held = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        if self._objects is not None:
            fed, self._held = self._held, ""
            if not self._objects.feed(fed, parsed):
                return False
            self._leave(self._objects, parsed)
        if self._may_close:
            self._may_close = not self._skip_closing(self.CLOSE)
        if self._may_close or not self._find(self.OPEN, parsed):
            return False
        self._objects = CallObjects(self._teller, stop=self.CLOSE, name_key=self.NAME_KEY)
        return True

    def _leave(self, objects: CallObjects, parsed: Parsed) -> None:
        """Go on behind what began with the marker."""
        self._objects, self._held = None, objects.rest or ""
        self._may_close = self._skips_space = objects.is_certain
        if not objects.is_certain:
            self._add_text(self.OPEN, parsed)


class HermesCalls(MarkedCalls):
    """`<tool_call>{...}</tool_call>`, as Hermes, Qwen and Granite 4 write."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    markers = (OPEN, CLOSE)


class HunyuanCalls(MarkedCalls):
    """`<tool_calls>[...]</tool_calls>`, as Hunyuan A13B and Apriel write."""

    OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
    markers = (OPEN, CLOSE)


class GraniteCalls(MarkedCalls):
    """`<|tool_call|>[...]`, as Granite 3 writes."""

    OPEN, CLOSE = "<|tool_call|>", ""
    markers = (OPEN,)


class GigaChatCalls(MarkedCalls):
    """`<|function_call|>{...}`, as GigaChat writes from version 3.1 on: one, at the end of a message."""

    OPEN, CLOSE = "<|function_call|>", ""
    markers = (OPEN,)


class PhiCalls(MarkedCalls):
    """`<|tool_call|>[...]<|/tool_call|>`, as Phi-4-mini writes."""

    OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"
    markers = (OPEN, CLOSE)


class NemotronCalls(MarkedCalls):
    """`<TOOLCALL>[...]</TOOLCALL>`, as Nvidia's Llama-Nemotron writes."""

    OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"
    markers = (OPEN, CLOSE)


def written_call_object(name: str, arguments: Mapping[str, Any] | str, key: str = "arguments") -> str:
    """A call as an object of which `key` holds the arguments; any that are none stand as they are."""
    written = arguments if isinstance(arguments, str) else json_text(arguments)
    return f'{{"name": {json.dumps(name)}, "{key}": {written}}}'
