"""How long the target will still be away, from how long it was when it was lost before."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.running_mean import RunningMean

# Seconds in which a lost target is replaced, until that has been seen.
FIRST_S = 5.0
# Of the time that it has been away beyond what was expected, it stays away so much longer.
OVERDUE_SHARE = 0.5


@dataclass(slots=True)
class Outages:
    """Losses of the target and its returns."""

    _lost_at: float | None = None
    _took_s: RunningMean = field(default_factory=lambda: RunningMean(FIRST_S))

    def lost(self, now: float) -> None:
        """The target is away from now on."""
        if self._lost_at is None:
            self._lost_at = now

    def ready(self, now: float) -> None:
        """The target is there."""
        if self._lost_at is not None:
            self._took_s.follow(max(0.0, now - self._lost_at))
        self._lost_at = None

    def left_s(self, now: float) -> float:
        """Seconds until the target is expected to serve again; 0 while it does."""
        if self._lost_at is None:
            return 0.0
        away_s = max(0.0, now - self._lost_at)
        return max(self._took_s.value - away_s, OVERDUE_SHARE * (away_s - self._took_s.value), 1.0)
