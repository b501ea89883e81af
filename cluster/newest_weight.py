"""How much the newest of what is observed counts: more at first, and again after a while without any."""

from __future__ import annotations

from dataclasses import dataclass

# The first observations count as if so many before had been what the profile says.
PRIOR = 3
# What one step in which nothing is observed takes from the observations that there have been.
FORGOTTEN = 0.25


@dataclass(slots=True)
class NewestWeight:
    """Weight of the newest observation of something that changes, given how many there were lately."""

    _seen: float = 0.0

    def next(self, smoothing: float) -> float:
        """Weight of one more observation.

        Args:
            smoothing: what it comes down to with many of them, above 0.
        """
        self._seen = min(self._seen + 1.0, 1.0 / smoothing)
        return max(smoothing, 1.0 / (self._seen + PRIOR))

    def missed(self) -> None:
        """A step said nothing: what was seen before tells less of what is now."""
        self._seen = max(0.0, self._seen - FORGOTTEN)
