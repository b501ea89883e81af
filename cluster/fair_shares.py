"""Who asks a cell for more than its fair share of what it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# What came so many seconds ago counts for 1/e of what comes now.
MEMORY_S = 10.0
# Tenants that are remembered: those that asked last.
MOST_KEPT = 1024
# Who asks for so many times its share asks for more whatever chance has to do with it. Within that, whoever
# asks for most does, or for nearly as much.
MARGIN = 1.25


@dataclass(slots=True)
class _Rate:
    """Something per second, which fades exponentially; of a tenant also its weight, as of late."""

    value: float = 0.0
    at: float = 0.0
    weight: float = 1.0

    def add(self, amount: float, now: float) -> None:
        self.value, self.at = self.faded(now) + amount / MEMORY_S, now

    def faded(self, now: float) -> float:
        return self.value * math.exp(-max(0.0, now - self.at) / MEMORY_S)


@dataclass(slots=True)
class FairShares:
    """What tenants ask for, and which of them are to leave some of it to others.

    Shares are max-min fair: whoever asks for no more than an equal part of what is taken, by weight, has all
    of it, and what it leaves is shared by the rest (Bertsekas and Gallager, Data Networks, section 6.5.2).
    """

    # What is charged by fair queueing, of all that was asked for, by label of the tenant; the latest is last.
    _asked: dict[str, _Rate] = field(default_factory=dict)
    # Of what was taken, of all tenants, times their weights.
    _taken: _Rate = field(default_factory=_Rate)

    def asked(self, label: str, charge: float, weight: float, now: float) -> None:
        """A tenant of a weight asks for something, whether it gets it or not, for the first time."""
        rate = self._asked.pop(label, None) or _Rate()
        while len(self._asked) >= MOST_KEPT:
            del self._asked[next(iter(self._asked))]
        rate.add(charge, now)
        rate.weight = weight
        self._asked[label] = rate

    def took(self, charge: float, weight: float, now: float) -> None:
        """A request of a tenant of a weight was taken."""
        self._taken.add(charge * weight, now)

    def asks_for_more(self, label: str, now: float) -> bool:
        """Whether the tenant asks for more than its share."""
        rates = {one: (rate.faded(now), rate.weight) for one, rate in self._asked.items()}
        own, taken = rates.get(label, (0.0, 1.0))[0], self._taken.faded(now)

        def is_above_share(rate: float) -> bool:
            return sum([weight * min(other, rate) for other, weight in rates.values()]) > taken

        if is_above_share(own / MARGIN):
            return True
        return own * MARGIN >= max(rate for rate, _ in rates.values()) and is_above_share(own)
