"""Which shapes of batches are captured, when a new one is, and which one serves a batch that has none."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, Protocol, TypeVar

#: A shape is captured when it comes for the so manieth time: soon where batches of it would go the ordinary
#: way, later where they can be padded to a larger captured one, since a capture holds up who is in the batch.
CAPTURE_AT, CAPTURE_AT_BESIDE = 2, 16


class AnyShape(Hashable, Protocol):
    """What is captured by shape has shapes that say this of each other."""

    @property
    def num_rows(self) -> int:
        """Of a batch, padding included."""
        ...

    def serves(self, other: Any) -> bool:
        """Whether batches of another shape, of the same class, may be padded to this one."""
        ...


ShapeOf = TypeVar("ShapeOf", bound=AnyShape)
Captured = TypeVar("Captured")


class CapturedShapes(Generic[ShapeOf, Captured]):
    """What is captured, by shape.

    Attributes:
        has_room: whether there is memory for more, as far as known.
    """

    def __init__(self, most: int, *, capture_at: int = CAPTURE_AT) -> None:
        """Nothing yet, and at most so many shapes, each when it was met so often."""
        self.has_room = True
        self._most = most
        self._capture_at = capture_at
        self._capture_at_beside = capture_at * CAPTURE_AT_BESIDE // CAPTURE_AT
        self._met: dict[ShapeOf, int] = {}
        self._captured: dict[ShapeOf, Captured] = {}

    @property
    def shapes(self) -> list[ShapeOf]:
        """In the order of their capture."""
        return list(self._captured)

    def __getitem__(self, shape: ShapeOf) -> Captured | None:
        return self._captured.get(shape)

    def __contains__(self, shape: ShapeOf) -> bool:
        return shape in self._captured

    def keep(self, shape: ShapeOf, captured: Captured) -> None:
        """It was captured."""
        self._captured[shape] = captured

    def is_due(self, shape: ShapeOf, *, at_once: bool = False) -> bool:
        """Whether a shape that a batch has, and that is not captured, is to be now.

        `at_once` if it is to be whenever there is room.
        """
        self._met[shape] = self._met.get(shape, 0) + 1
        needed = self._capture_at if self._near(shape) is None else self._capture_at_beside
        has_room = self.has_room and len(self._captured) < self._most
        return has_room and (at_once or self._met[shape] >= needed)

    def serving(self, shape: ShapeOf) -> Captured | None:
        """The smallest that batches of a shape may be padded to, if there is one; of equals the first."""
        near = self._near(shape)
        return None if near is None else self._captured[near]

    def _near(self, shape: ShapeOf) -> ShapeOf | None:
        serving = (one for one in self._captured if one.serves(shape))
        return min(serving, key=lambda one: one.num_rows, default=None)
