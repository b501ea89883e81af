"""A mean that forgets: what is believed of a quantity from its latest values."""

from __future__ import annotations

from dataclasses import dataclass

# Weight of the newest value, once there have been some.
SMOOTHING = 0.1


@dataclass(slots=True)
class RunningMean:
    """A mean that follows its first values fast and later ones by SMOOTHING."""

    value: float
    seen: int = 0

    def follow(self, value: float) -> None:
        """Move towards `value`."""
        self.seen += 1
        self.value += max(SMOOTHING, 1.0 / (self.seen + 3)) * (value - self.value)
