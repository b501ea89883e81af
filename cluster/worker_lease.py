"""How long a worker's process lives without a scheduler: until the next one takes it over, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

#: A scheduler's machine that does not acknowledge signs of life for so long is gone: no process of it is
#: left that could close the connection.
UNACKNOWLEDGED_S = 10.0


@dataclass(slots=True)
class Lease:
    """Whether a worker whose scheduler is gone still waits for another one.

    A worker that outlives its cell belongs to nobody, so it must end itself: at once if the cell had not
    said that it is worth waiting, for then nobody will come for it, and else when nobody has come for a
    while.

    Args:
        patience_s: that while, in seconds; also until the first scheduler connects.
        heard_at: when the process began.

    Attributes:
        is_kept: whether the cell has said that another one may take the worker over.
        is_busy: whether a call of the cell is running: to load a model may take longer than the patience.
        was_connected: whether there has been a scheduler since the process began, or was taken over.
    """

    patience_s: float
    heard_at: float
    is_kept: bool = False
    is_busy: bool = False
    was_connected: bool = False

    def heard(self, now: float) -> None:
        """A cell has called."""
        self.heard_at = now

    def renew(self, now: float) -> None:
        """Another cell has taken the worker over, and is about to connect."""
        self.heard_at, self.was_connected, self.is_kept = now, False, False

    def is_over(self, now: float, is_connected: bool) -> bool:
        """Whether the process must end.

        Args:
            now: of the monotonic clock, seconds.
            is_connected: whether a scheduler's connection stands.
        """
        if is_connected:
            self.was_connected, self.heard_at = True, now
            return False
        if self.was_connected and not self.is_kept:
            return True
        if self.is_busy:
            self.heard_at = now
        return now - self.heard_at > self.patience_s
