"""Stop strings over text that arrives in pieces."""

from __future__ import annotations


class StopStrings:
    """Passes text on up to the first stop string, holding back what may be the beginning of one.

    The first stop string is the one completed first, and of several completed by the same character the
    longest. That depends on the text alone, so the result is the same however the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, stops: bool = True) -> str:
        """What may be shown now that `text` arrived; `matched` is set once a stop string is complete.

        Without `stops` none is taken that ends in `text`; one that begins there may still be completed later.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        # A match cannot begin before the held text: everything that could begin one is held. Nor does it end
        # there: one that does was not to be taken.
        num_held = len(self._held)
        text = self._held + text
        self._held = ""
        if stops and (match := self._first(text, num_held)) is not None:
            end, start, self.matched = match
            return text[: end if self._include else start]
        held = max(_overlap(text, stop) for stop in self._stops)
        if held:
            text, self._held = text[:-held], text[-held:]
        return text

    def _first(self, text: str, after: int) -> tuple[int, int, str] | None:
        """End, start and stop string of the first match that ends behind the first `after` characters."""
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, after + 1 - len(stop)))) >= 0
        ]
        return min(found, default=None)

    def finish(self) -> str:
        """What is still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
