"""Which log-probabilities are of the text of an answer, and which of the form of calls in it."""

from __future__ import annotations

from typing import Any


class TextLogprobs:
    """Finds the tokens of each piece of text among those that came.

    A token that shows nothing, as the first bytes of a character, is of what comes next. One of which a part
    is text and the other the beginning of a call is of the text.
    """

    def __init__(self) -> None:
        # What tokens show of which it is not known yet whether it is text; the rest of one has no entry.
        self._untold: list[tuple[str, dict[str, Any] | None]] = []
        # Whether what is untold may begin with the rest of a call.
        self._follows_call = False

    def add(self, shown: str, entries: list[dict[str, Any]]) -> None:
        """A token that shows that, or without an entry what had been held back of those before."""
        self._untold.append((shown, entries[0] if entries else None))

    def told_call(self) -> None:
        """A part of a call was found in what the tokens show."""
        self._follows_call = True

    def of(self, text: str) -> list[dict[str, Any]]:
        """The entries of the next piece of text; what came before it was none."""
        untold = "".join(shown for shown, _ in self._untold)
        # Behind a call the last place where it stands: the call may have it, too.
        begin = untold.rfind(text) if self._follows_call or not untold.startswith(text) else 0
        if begin < 0:  # between two messages stand line breaks that no token wrote
            text = text.removeprefix("\n\n")
            begin = max(0, untold.rfind(text))
        self._follows_call = False
        end, at = begin + len(text), 0
        found: list[dict[str, Any]] = []
        left: list[tuple[str, dict[str, Any] | None]] = []
        for shown, entry in self._untold:
            start, at = at, at + len(shown)
            if start >= end:
                left.append((shown, entry))
                continue
            if entry is not None and (at > begin or start == at == begin):
                found.append(entry)
            if at > end:
                left.append((shown[end - at :], None))
        self._untold = left
        return found

    def rest(self) -> list[dict[str, Any]]:
        """The entries of tokens that came after the last piece of text."""
        return [entry for _, entry in self._untold if entry is not None]
