"""How far below its objectives a request must be predicted to be, in an overload, for few to be late."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# So many of those that were predicted to be on time may be late.
LATE_SHARE = 0.1
# So many more than are late anyway, where what adds them is less urgent by its own word.
BACKGROUND_LATE_SHARE = 0.02
# By how much one that ends without any of it beside it changes what is taken to be late anyway.
SMOOTHING = 0.02
# What a request that is late adds. One that is on time takes as much less as makes both even at that share.
STEP = 0.05
# Share of an objective, at first and within what limits.
FIRST, LEAST, MOST = 0.35, 0.1, 0.8
# What was learned fades, as nothing is learned while nobody is taken.
MEMORY_S = 60.0
# What is late anyway depends on the machine and the objectives, which last.
ANYWAY_MEMORY_S = 600.0


@dataclass(slots=True)
class Headroom:
    """A share of each objective, learned from how those ended that were predicted to keep theirs.

    Predictions are means: of requests predicted to take exactly what their objective allows, half are late.
    By how much less it must be depends on how the times spread, and on what predictions miss. It need not
    be known for a share of late ones to be kept: adaptive conformal inference (Gibbs and Candès, NeurIPS
    2021, equation 2).

    Attributes:
        late_share: how many of them may be late.
        step: what a request that is late adds.
    """

    late_share: float = LATE_SHARE
    step: float = STEP
    _value: float = FIRST
    _at: float = 0.0

    def value(self, now: float) -> float:
        """The share now."""
        faded = math.exp(-max(0.0, now - self._at) / MEMORY_S)
        return FIRST + (self._value - FIRST) * faded

    def ended(self, now: float, *, is_late: bool) -> None:
        """A request ended that had been predicted to be on time."""
        value = self.value(now) + self.step * ((1.0 if is_late else 0.0) - self.late_share)
        self._value, self._at = min(MOST, max(LEAST, value)), now

    def scarcity(self, now: float) -> float:
        """From 0, as many are on time as should, to 1, where the headroom cannot grow further."""
        return max(0.0, (self.value(now) - FIRST) / (MOST - FIRST))


@dataclass(slots=True)
class BackgroundHeadroom:
    """What the background leaves of each objective, so that hardly anybody is late because of it.

    More may be late than hardly anybody: on a busy machine, or with objectives that an idle cell just
    keeps. How many are tell those who end while none of the background is in steps. The background would else
    give way to everybody for ever and change nothing.
    """

    _headroom: Headroom = field(default_factory=lambda: Headroom(BACKGROUND_LATE_SHARE))
    _anyway: float = 0.0
    _at: float = 0.0

    def value(self, now: float) -> float:
        """The share now."""
        return self._headroom.value(now)

    def late_anyway(self, now: float) -> float:
        """The share of those that are late without the background; as long as nobody tells, it fades."""
        return self._anyway * math.exp(-max(0.0, now - self._at) / ANYWAY_MEMORY_S)

    def ended(self, now: float, *, is_late: bool, is_beside: bool) -> None:
        """A request ended that had been predicted to be on time; beside some of the background or none."""
        if not is_beside:
            anyway = self.late_anyway(now)
            self._anyway, self._at = anyway + SMOOTHING * (float(is_late) - anyway), now
        late_share = min(0.5, BACKGROUND_LATE_SHARE + self.late_anyway(now))
        # The more are late by chance, the less one of them says.
        self._headroom.step = STEP * math.sqrt(_variance(BACKGROUND_LATE_SHARE) / _variance(late_share))
        self._headroom.late_share = late_share
        self._headroom.ended(now, is_late=is_late)


def _variance(share: float) -> float:
    """Of whether a request is late."""
    return share * (1.0 - share)
