"""An answer as it is given, which any number of readers follow from any position."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from deployments.errors import ApiError, bad_request


class ReplayLog:
    """The parts of one answer, in order: server-sent events, or the body of one without a stream.

    It belongs to one event loop. A position is the index of a part.

    Attributes:
        num_bytes: of all parts.
        is_complete: whether nothing more comes.
        error: what ended it before its first part; None if nothing did.
        headers: of the response.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._changed = asyncio.Event()
        self.num_bytes = 0
        self.is_complete = False
        self.error: ApiError | None = None
        self.headers: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, part: bytes) -> None:
        """The next part."""
        self._parts.append(part)
        self.num_bytes += len(part)
        self._wake()

    def add_events(self, events: bytes) -> None:
        """Server-sent events, each of which is given its position as `id`."""
        for event in events.split(b"\n\n"):
            if event:
                self.add(b"id: %d\n%s\n\n" % (len(self._parts), event))

    def complete(self, error: ApiError | None = None) -> None:
        """Nothing more comes; `error` says why if there is nothing at all."""
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
        # Who waits holds the old one; those that come wait for the next part.
        self._changed.set()
        self._changed = asyncio.Event()
