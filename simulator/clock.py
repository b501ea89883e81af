"""Simulated time: a heap of things to come, in order of time and then of scheduling."""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class EventClock(Generic[Thing]):
    """Things due at times in seconds; equal times come in the order they were put in.

    Attributes:
        now: time of what was taken last.
    """

    __slots__ = ("_heap", "_sequence", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Thing]] = []
        self._sequence = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def due(self) -> float:
        """When the next thing comes; infinity if nothing is left."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, time: float, thing: Thing) -> None:
        """Let `thing` come at `time`, which must not lie in the past.

        Raises:
            ValueError: if it does.
        """
        if time < self.now:
            raise ValueError(f"it is {self.now:.6f} s: nothing can come at {time:.6f} s any more")
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, thing))

    def take(self) -> Thing:
        """The next thing; time moves on to when it is due. IndexError if nothing is left."""
        self.now, _, thing = heapq.heappop(self._heap)
        return thing
