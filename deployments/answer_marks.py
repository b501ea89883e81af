"""Marks around what a model says, which are no part of it."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.tool_calls import overlap


class AnswerMarks:
    """Leaves out the marks that stand around an answer's text, which arrives in pieces of any size.

    An answer that does not begin with a mark has none: any that is found later is a part of the text.

    Args:
        pairs: what may stand before a text, and then stands behind it.
        is_begun: whether the prompt ends within such a text, so that only a mark behind it is to come.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], *, is_begun: bool = False) -> None:
        self._opening = () if is_begun else tuple(pairs)
        self._closing = tuple(close for _, close in pairs) if is_begun else ()
        self._held = ""

    def feed(self, text: str) -> str:
        """What is certain to be text with `text`."""
        text = self._held + text
        self._held = ""
        if self._opening:
            following = text.lstrip()
            found = [pair for pair in self._opening if following.startswith(pair[0])]
            if not found and any(mark.startswith(following) for mark, _ in self._opening):  # as nothing does
                self._held = text
                return ""
            self._opening = ()
            for opened, close in found:
                self._closing, text = (close,), following.removeprefix(opened)
        if not self._closing:
            return text
        places = [(at, mark) for mark in self._closing if (at := text.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._closing = ()
            return text[:at] + text[at + len(mark) :]
        certain = len(text) - max(overlap(text, mark) for mark in self._closing)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The rest, when no more text comes."""
        rest, self._held = self._held, ""
        return rest
