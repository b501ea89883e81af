"""How many times as long as its profile says a forward takes, by the rows in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

# A factor for each power of two rows, from 1 on; larger forwards have the last.
NUM_SIZES = 11
# What is seen of one size says so much of others that have been seen themselves: the machine became slower.
SAYS_OF_OTHERS = 0.25
# The first forward of a size counts as one of so many, however long others have been known.
FIRST_OF = 4


class SizeCorrection:
    """A factor for every number of rows: lines between those of powers of two, by their logarithms.

    Small forwards read weights, large ones compute, and what shares the machine slows the two differently:
    on two cores that are threads of one, plain steps of one request take 0.73 times what a profile measured
    in an idle process says, and of 24 requests 1.20 times. With one factor for all, steps of few requests
    seem half as long again as they are wherever there were many before.

    Nothing is forgotten of a size for not being seen. One that never was is believed to be as far off as
    those that were.
    """

    def __init__(self, factors: Sequence[float] = (1.0,) * NUM_SIZES) -> None:
        """Start from these, of 1, 2, 4, ... rows.

        Raises:
            ValueError: if they are not `NUM_SIZES`, all above 0.
        """
        if len(factors) != NUM_SIZES or min(factors) <= 0.0:
            raise ValueError(f"{len(factors)} factors by size, of which {NUM_SIZES} above 0 are needed")
        self._log = [math.log(factor) for factor in factors]
        # From 0, never seen, to 1.
        self._seen = [0.0] * NUM_SIZES

    @property
    def factors(self) -> list[float]:
        """Of 1, 2, 4, ... rows."""
        return [math.exp(log) for log in self._log]

    def factor(self, num_tokens: float) -> float:
        """Of a forward of so many rows."""
        size, beyond = _place(num_tokens)
        return math.exp(_between(self._log, size, beyond))

    def correct(self, num_tokens: float, ratio: float, weight: float, share: float = 1.0) -> None:
        """A forward of so many rows took `ratio` times what was predicted of it, correction and all.

        Args:
            num_tokens: its rows.
            ratio: above 0.
            weight: of this forward beside those before it.
            share: of the forward that the rows are accountable for, up to 1.
        """
        size, beyond = _place(num_tokens)
        first = (1.0 - _between(self._seen, size, beyond)) / FIRST_OF
        weight = share * max(weight, first)
        wanted = weight * math.log(ratio)
        moved = [max(SAYS_OF_OTHERS, 1.0 - seen) * wanted for seen in self._seen]
        # What is believed of this size moves by all that is wanted; the sizes on both sides make up for it.
        left = (wanted - _between(moved, size, beyond)) / ((1.0 - beyond) ** 2 + beyond**2)
        moved[size] += (1.0 - beyond) * left
        moved[size + 1] += beyond * left
        self._log = [log + more for log, more in zip(self._log, moved, strict=True)]
        for place, near in ((size, 1.0 - beyond), (size + 1, beyond)):
            self._seen[place] += weight * near * (1.0 - self._seen[place])


def _place(num_tokens: float) -> tuple[int, float]:
    """The largest power of two that is no more than so many rows, and how far they are on to the next."""
    power = min(math.log2(max(1.0, num_tokens)), NUM_SIZES - 1.0)
    size = min(int(power), NUM_SIZES - 2)
    return size, power - size


def _between(values: Sequence[float], size: int, beyond: float) -> float:
    """On the line from one value to the next."""
    return (1.0 - beyond) * values[size] + beyond * values[size + 1]
