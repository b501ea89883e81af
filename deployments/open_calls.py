"""Calls of a server that goes: what is left of them in the end is told why it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from deployments.errors import ApiError

#: Those whose calls are cut off are told why, which takes a moment to reach them.
TOLD_S = 0.5

CUT_OFF = ApiError(
    503,
    "This front end was removed, and the time that its calls had to end is over. Send the call again: "
    "another front end answers it, and goes on where this one stopped if it has an `idempotency-key`.",
    code="draining",
    retry_after_s=1.0,
)


class OpenCalls:
    """Calls under way in one event loop, which can be ended all at once with a reason.

    Attributes:
        are_cut_off: whether they were.
    """

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.are_cut_off = False

    @contextlib.contextmanager
    def with_one(self, limit: asyncio.Timeout) -> Iterator[None]:
        """While this call goes on, which ends when its limit is reached."""
        self._loop = asyncio.get_running_loop()
        self._limits.add(limit)
        if self.are_cut_off:
            self.cut_off()
        try:
            yield
        finally:
            self._limits.discard(limit)

    def cut_off(self) -> None:
        """End them now, and those that come."""
        self.are_cut_off = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def cut_off_from_outside(self) -> None:
        """The same from another thread."""
        self.are_cut_off = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended, and they with it
                self._loop.call_soon_threadsafe(self.cut_off)
