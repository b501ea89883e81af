"""How well the times of a model's calls were predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CostAccount:
    """Calls of a model since the start, seconds predicted and taken, and the sum of absolute errors."""

    calls: int = 0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    error_s: float = 0.0

    def add(self, predicted_s: float, actual_s: float) -> None:
        """One call."""
        self.calls += 1
        self.predicted_s += predicted_s
        self.actual_s += actual_s
        self.error_s += abs(predicted_s - actual_s)
