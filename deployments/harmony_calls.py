"""Calls of tools as gpt-oss writes them: messages that are for a function, in OpenAI's Harmony format."""

from __future__ import annotations

import re
from collections.abc import Collection

from deployments import harmony
from deployments.call_objects import Arguments
from deployments.tool_calls import CallsInText, Parsed, overlap

_OPENING = re.compile("|".join(map(re.escape, harmony.OPENS)))
_BEHIND = re.compile("|".join(map(re.escape, (*harmony.ENDS, *harmony.OPENS))))


class HarmonyCalls(CallsInText):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, behind a text.

    Whom a message is for may also stand in front of its channel, behind `<|start|>assistant`. All that is
    behind the header of a call are its arguments, `{}` if that is nothing, and what follows complete ones is
    nothing. `<|call|>` is a stop token of the models there are: they make one call at a time. Other messages
    are left as they are; `HarmonyParser` takes their headers off.

    Args:
        names: of the functions that there are.
        most: how many calls are told; None for all.
        is_forced: whether the answer is a call that the client named.
        has_text: whether there may be anything but calls, as decoding was not constrained to them.
    """

    markers: tuple[str, ...] = harmony.MARKERS

    def __init__(
        self,
        names: Collection[str],
        most: int | None = None,
        *,
        is_forced: bool = False,
        has_text: bool = True,
    ) -> None:
        super().__init__(names, most)
        self.is_forced = is_forced
        self.has_text = has_text
        self._is_header = self._is_behind = False  # in a header; behind arguments
        self._arguments: Arguments | None = None
        self._is_empty = False  # no argument so far

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        parsed = Parsed()
        if self._arguments is not None:
            self._arguments.finish(parsed)
            self._end_arguments(parsed)
        elif not self._is_behind:
            self._add_text(self._held, parsed)
        self._held = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        if self._arguments is not None:
            return self._read_arguments(self._arguments, parsed)
        if self._is_behind:
            return self._skip_end()
        if self._is_header:
            return self._read_header(parsed)
        found = _OPENING.search(self._held)
        kept = 0 if found else max(overlap(self._held, mark) for mark in harmony.OPENS)
        at = found.start() if found else len(self._held) - kept
        self._add_text(self._held[:at], parsed)
        self._held, self._is_header = self._held[at:], found is not None
        return self._is_header

    def _read_header(self, parsed: Parsed) -> bool:
        """Find out whether a header is that of a call; whether that is known."""
        at = self._held.find(harmony.MESSAGE, 0, harmony.LONGEST_HEADER + len(harmony.MESSAGE))
        if at < 0 and len(self._held) < harmony.LONGEST_HEADER + len(harmony.MESSAGE):
            return False
        opening = _OPENING.match(self._held)
        assert opening is not None
        size = (
            at + len(harmony.MESSAGE) if at >= 0 else opening.end()
        )  # of a header, or of a mark that is text
        header, self._held, self._is_header = self._held[:size], self._held[size:], False
        name = harmony.called(header) if at >= 0 else ""
        if name in self._teller.names:
            self._teller.begin(name, "", parsed)
            self._arguments, self._is_empty = Arguments(self._teller, harmony.CALL), True
        else:
            self._add_text(header, parsed)
        return True

    def _read_arguments(self, arguments: Arguments, parsed: Parsed) -> bool:
        fed, self._held = self._held, ""
        if self._is_empty:
            fed = fed.lstrip()
            if harmony.CALL.startswith(fed) and fed != harmony.CALL:
                self._held = fed
                return False
            self._is_empty = fed.startswith(harmony.CALL)
        rest = fed if self._is_empty else arguments.feed(fed, parsed)
        if rest is None:
            return False
        self._end_arguments(parsed)
        self._held, self._is_behind, self._skips_space = rest, True, True
        return True

    def _end_arguments(self, parsed: Parsed) -> None:
        self._arguments = None
        if self._is_empty:
            self._teller.more(self._held or "{}", parsed)

    def _skip_end(self) -> bool:
        """Leave out the rest of a call's message; whether its end, or another one, is there."""
        found = _BEHIND.search(self._held)
        if found is None:
            kept = max(overlap(self._held, mark) for mark in (*harmony.ENDS, *harmony.OPENS))
            self._held = self._held[len(self._held) - kept :]
            return False
        is_end = found[0] in harmony.ENDS
        self._held, self._is_behind = self._held[found.end() if is_end else found.start() :], False
        return True

    def _add_text(self, text: str, parsed: Parsed) -> None:
        if self.has_text:
            super()._add_text(text, parsed)


def written_harmony_call(name: str, arguments: str) -> str:
    """A call as such a model writes it, with the JSON text of its arguments."""
    header = (
        f"{harmony.CHANNEL}commentary to={harmony.FUNCTIONS}{name} {harmony.CONSTRAIN}json{harmony.MESSAGE}"
    )
    return header + arguments + harmony.CALL
