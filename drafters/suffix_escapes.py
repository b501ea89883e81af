"""How often what came next had followed a context before: the complement of PPM's escape probability.

It is estimated from what happened in contexts of that kind, as in secondary escape estimation (C. Bloom 1996;
D. Shkarin, "PPM: one step to practicality", 2002), because the counts of one context are too few to tell.
"""

from __future__ import annotations

from enum import IntEnum

_LONGEST = 16  # longer contexts are of one kind
_PRIOR_WEIGHT = 4.0
_WINDOW = 1000.0  # observations are halved at so many, so that the estimate follows the traffic


class Source(IntEnum):
    """Whose tokens a context was found in."""

    OWN = 0
    RECENT = 1


class EscapeRecord:
    """Observations by kind of context: whose it is, its length, and whether one token or more followed."""

    def __init__(self) -> None:
        """Nothing observed: a context of n tokens is believed with n / (n + 1)."""
        self._tried: dict[tuple[int, int, bool], float] = {}
        self._found: dict[tuple[int, int, bool], float] = {}

    def add(self, source: Source, length: int, num_followers: int, found: bool) -> None:
        """What came next was, or was not, among the context's followers."""
        kind = (source, min(length, _LONGEST), num_followers == 1)
        tried = self._tried.get(kind, 0.0) + 1.0
        agreed = self._found.get(kind, 0.0) + found
        if tried > _WINDOW:
            tried, agreed = tried / 2, agreed / 2
        self._tried[kind], self._found[kind] = tried, agreed

    def rate(self, source: Source, length: int, num_followers: int) -> float:
        """Chance that what comes next is among the followers, strictly inside (0, 1)."""
        kind = (source, min(length, _LONGEST), num_followers == 1)
        prior = _PRIOR_WEIGHT * length / (length + 1)
        return (self._found.get(kind, 0.0) + prior) / (self._tried.get(kind, 0.0) + _PRIOR_WEIGHT)
