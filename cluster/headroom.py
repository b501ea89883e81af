"""How far below its objectives a request must be predicted to be, in an overload, for few to be late."""

from __future__ import annotations

import math
from dataclasses import dataclass

# So many of those that were predicted to be on time may be late.
LATE_SHARE = 0.1
# So many where what makes them late is less urgent than they are by its own word.
BACKGROUND_LATE_SHARE = 0.02
# What a request that is late adds. One that is on time takes as much less as makes both even at that share.
STEP = 0.05
# Share of an objective, at first and within what limits.
FIRST, LEAST, MOST = 0.35, 0.1, 0.8
# What was learned fades, as nothing is learned while nobody is taken.
MEMORY_S = 60.0


@dataclass(slots=True)
class Headroom:
    """A share of each objective, learned from how those ended that were predicted to keep theirs.

    Predictions are means: of requests predicted to take exactly what their objective allows, half are late.
    By how much less it must be depends on how the times spread, and on what predictions miss. It need not
    be known for a share of late ones to be kept: adaptive conformal inference (Gibbs and Candès, NeurIPS
    2021, equation 2).

    Attributes:
        late_share: how many of them may be late.
    """

    late_share: float = LATE_SHARE
    _value: float = FIRST
    _at: float = 0.0

    def value(self, now: float) -> float:
        """The share now."""
        faded = math.exp(-max(0.0, now - self._at) / MEMORY_S)
        return FIRST + (self._value - FIRST) * faded

    def ended(self, now: float, *, is_late: bool) -> None:
        """A request ended that had been predicted to be on time."""
        value = self.value(now) + STEP * ((1.0 if is_late else 0.0) - self.late_share)
        self._value, self._at = min(MOST, max(LEAST, value)), now

    def scarcity(self, now: float) -> float:
        """From 0, as many are on time as should, to 1, where the headroom cannot grow further."""
        return max(0.0, (self.value(now) - FIRST) / (MOST - FIRST))
