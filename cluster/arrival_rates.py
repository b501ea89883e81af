"""How many requests a second were taken lately, by tenant and priority: what may pass one that waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

# What came so many seconds ago counts for 1/e of what comes now.
MEMORY_S = 5.0
# Tenants and priorities that are remembered: those that came last.
MOST_KEPT = 1024


@dataclass(slots=True)
class ArrivalRates:
    """Rates that fade exponentially."""

    # Requests per second at a time, by label of the tenant and priority; the latest to come is last.
    _rates: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)

    def took(self, label: str, priority: int, now: float) -> None:
        """A request was taken."""
        rate = _faded(self._rates.pop((label, priority), (0.0, now)), now) + 1.0 / MEMORY_S
        while len(self._rates) >= MOST_KEPT:
            del self._rates[next(iter(self._rates))]
        self._rates[label, priority] = (rate, now)

    def passing(self, passes: Callable[[str, int], bool], now: float) -> float:
        """Requests per second of those tenants and priorities that are told to pass."""
        return sum(_faded(rate, now) for key, rate in self._rates.items() if passes(*key))


def _faded(rate: tuple[float, float], now: float) -> float:
    return rate[0] * math.exp(-max(0.0, now - rate[1]) / MEMORY_S)
