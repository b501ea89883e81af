"""An answer as it is given, which any number of readers follow from any position."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

from deployments.errors import ApiError, bad_request

# Of memory, for each part beside its own bytes: the object's head, and its place in the list.
_PART_BYTES = sys.getsizeof(b"") + 8
# And for the log itself, with what is known of the answer beside it.
_LOG_BYTES = 1024


class ReplayLog:
    """The parts of one answer, in order: events or messages of a stream, or the one of an answer without.

    It belongs to one event loop. A position is the index of a part.

    Attributes:
        num_bytes: memory that is held, of all parts and of the log itself.
        is_complete: whether nothing more comes.
        error: what readers are told at its end; None if nothing is amiss, or a part says it.
        failure: what the last part tells readers; None if it is part of the answer.
        headers: of the response.
    """

    __slots__ = ("_changed", "_parts", "error", "failure", "headers", "is_complete", "num_bytes")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        # Only while somebody waits: a log is kept for long after its last part.
        self._changed: asyncio.Event | None = None
        self.num_bytes = _LOG_BYTES
        self.is_complete = False
        self.error: ApiError | None = None
        self.failure: ApiError | None = None
        self.headers: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, part: bytes) -> None:
        """The next part."""
        self._parts.append(part)
        self.num_bytes += len(part) + _PART_BYTES
        self._wake()

    def add_events(self, events: bytes) -> None:
        """Server-sent events, each of which is given its position as `id`."""
        for event in events.split(b"\n\n"):
            if event:
                self.add(b"id: %d\n%s\n\n" % (len(self._parts), event))

    def complete(self, error: ApiError | None = None) -> None:
        """Nothing more comes; `error` says why if no part does."""
        self.is_complete, self.error = True, error
        self._wake()

    async def read(self, first: int = 0) -> AsyncGenerator[bytes, None]:
        """The parts from position `first` on, those there are and then those that come.

        Raises:
            ApiError: `error`, or 400 if the answer ends before `first`.
        """
        position = first
        while True:
            while position < len(self._parts):
                yield self._parts[position]
                position += 1
            if self.is_complete:
                break
            if self._changed is None:
                self._changed = asyncio.Event()
            await self._changed.wait()
        if self.error is not None:
            raise self.error
        if position > len(self._parts):
            raise bad_request(
                f"`Last-Event-ID` is {first - 1}, and the last event of this answer has the id "
                f"{len(self._parts) - 1}. Send the id of the last event you have.",
                "Last-Event-ID",
            )

    def _wake(self) -> None:
        # Who waits holds it; those that come wait for the next part.
        if self._changed is not None:
            self._changed.set()
            self._changed = None
