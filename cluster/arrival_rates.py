"""How many requests a second were taken lately, by tenant and priority: what may pass one that waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# What came so many seconds ago counts for 1/e of what comes now.
MEMORY_S = 5.0
# Tenants and priorities that are remembered: those that came last.
MOST_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests of one tenant and priority that were taken lately.

    Attributes:
        label: of the tenant.
        priority: lower is earlier.
        rate: requests per second.
        charge: what fair queueing charges for one, the latest.
    """

    label: str
    priority: int
    rate: float
    charge: float


@dataclass(slots=True)
class ArrivalRates:
    """Rates that fade exponentially."""

    # Requests per second at a time, and a charge, by label of the tenant and priority; the latest is last.
    _rates: dict[tuple[str, int], tuple[float, float, float]] = field(default_factory=dict)

    def took(self, label: str, priority: int, charge: float, now: float) -> None:
        """A request was taken."""
        rate, at, _ = self._rates.pop((label, priority), (0.0, now, 0.0))
        while len(self._rates) >= MOST_KEPT:
            del self._rates[next(iter(self._rates))]
        self._rates[label, priority] = (_faded(rate, now - at) + 1.0 / MEMORY_S, now, charge)

    def flows(self, now: float) -> list[Flow]:
        """All that are remembered, at their present rates."""
        return [Flow(*key, _faded(rate, now - at), charge) for key, (rate, at, charge) in self._rates.items()]


def _faded(rate: float, seconds: float) -> float:
    return rate * math.exp(-max(0.0, seconds) / MEMORY_S)
