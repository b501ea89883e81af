"""Calls of tools where the whole answer is calls: JSON objects, or the arguments of one."""

from __future__ import annotations

from collections.abc import Collection

from deployments.call_objects import CallObjects
from deployments.tool_calls import CallsInText, NewId, Parsed, Teller, openai_id


class JsonCalls(CallsInText):
    """An answer that is nothing but calls, `{"name": ..., "parameters": {...}}`, as Llama 3 models write.

    Several are separated by `;` or white space, or are a list. Text that begins in any other way is text.
    """

    TAG = "<|python_tag|>"
    markers: tuple[str, ...] = (TAG,)

    def __init__(
        self,
        names: Collection[str],
        most: int | None = None,
        *,
        has_text: bool = True,
        new_id: NewId = openai_id,
    ) -> None:
        """As `HermesCalls`; without text, as decoding was constrained to calls, only calls are told."""
        super().__init__(names, most, new_id)
        self.has_text = has_text
        self._before = ""  # the calls
        self._objects = CallObjects(self._teller, is_sequence=True, is_forced=not has_text)
        self._began = False

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        parsed = Parsed()
        if self._objects.rest is None:
            self._objects.finish(parsed)
            self._held = self._rest() + self._held
        self._add_text(self._held, parsed)
        self._held = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        if self._objects.rest is not None:
            self._add_text(self._held, parsed)
            self._held = ""
            return False
        if not self._began:
            following = self._held.lstrip()
            if len(following) < len(self.TAG) and self.TAG.startswith(following):
                return False
            self._began = True
            if following.startswith(self.TAG):
                size = len(self._held) - len(following) + len(self.TAG)
                self._before, self._held = self._held[:size], self._held[size:]
        fed, self._held = self._held, ""
        if not self._objects.feed(fed, parsed):
            return False
        self._held = self._rest()
        return True

    def _rest(self) -> str:
        self._skips_space = self._objects.is_certain
        return (self._objects.rest or "") if self._skips_space else self._before + (self._objects.rest or "")

    def _add_text(self, text: str, parsed: Parsed) -> None:
        if self.has_text:
            super()._add_text(text, parsed)


class NamedCall:
    """An answer that is nothing but the arguments of one call; each piece of it is told as it comes."""

    markers: tuple[str, ...] = ()
    is_forced = True
    has_text = False

    def __init__(self, name: str, new_id: NewId = openai_id) -> None:
        self._name = name
        self._teller = Teller((name,), None, new_id)

    @property
    def num_calls(self) -> int:
        """See `ToolParser`."""
        return self._teller.num_calls

    def feed(self, text: str) -> Parsed:
        """See `ToolParser`."""
        parsed = Parsed()
        if self.num_calls:
            self._teller.more(text, parsed)
        elif text:
            self._teller.begin(self._name, text, parsed)
        return parsed

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        return Parsed()
