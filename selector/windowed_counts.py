"""Counts of agreed tokens that forget what was before a change (ADWIN).

Bifet and Gavalda, "Learning from Time-Changing Data with Adaptive Windowing" (SDM 2007): everything counts
until the newest part of it differs from the rest by more than chance allows; then that part counts alone. The
newest part may be of any length, so a small change is found as well, after more tokens. What came long ago is
kept in coarser pieces, so that their number grows with the logarithm of the tokens. Where the paper has a
bound for any numbers, here is a two-sample test of rates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Tokens of the newest pieces, and the fewest on either side of a change.
PIECE_TOKENS = 64
# A piece holds at most this share of the tokens that came after it.
PIECE_SHARE = 8
# The newest pieces and the rest differ where their rates are so many standard deviations apart. That is for
# independent tokens: easy and hard places come in runs, so that it is nearer to half as many.
SHIFT_DEVIATIONS = 6.0


@dataclass(slots=True, kw_only=True)
class WindowedCounts:
    """Tokens judged and agreed with since the last change.

    Attributes:
        scored: tokens judged.
        agreed: those of them that were the drafter's first choice.
    """

    scored: float = 0.0
    agreed: float = 0.0
    _piece_scored: float = 0.0
    _piece_agreed: float = 0.0
    # Both counts of each whole piece, the oldest first.
    _pieces: list[tuple[float, float]] = field(default_factory=list)

    def add(self, scored: float, agreed: float) -> bool:
        """Count; whether there was a change, and what was before it is forgotten."""
        self.scored += scored
        self.agreed += agreed
        self._piece_scored += scored
        self._piece_agreed += agreed
        if self._piece_scored < PIECE_TOKENS:
            return False
        self._pieces.append((self._piece_scored, self._piece_agreed))
        self._piece_scored = self._piece_agreed = 0.0
        has_changed = self._forget_before_change()
        self._merge()
        return has_changed

    def _forget_before_change(self) -> bool:
        """Two-sample test of the newest pieces, one to nearly all of them, against what was before."""
        pooled = (self.agreed + 1.0) / (self.scored + 2.0)
        worst, kept, start = SHIFT_DEVIATIONS**2 * pooled * (1.0 - pooled), (0.0, 0.0), 0
        new_scored = new_agreed = 0.0
        for index in range(len(self._pieces) - 1, -1, -1):
            new_scored += self._pieces[index][0]
            new_agreed += self._pieces[index][1]
            old_scored, old_agreed = self.scored - new_scored, self.agreed - new_agreed
            if old_scored < PIECE_TOKENS:
                break
            difference = new_agreed / new_scored - old_agreed / old_scored
            square = difference**2 / (1.0 / new_scored + 1.0 / old_scored)
            if square > worst:
                worst, kept, start = square, (new_scored, new_agreed), index
        if not kept[0]:
            return False
        self.scored, self.agreed = kept
        del self._pieces[:start]
        return True

    def _merge(self) -> None:
        """Make one of neighbours that may be one by now."""
        after, merged = 0.0, list[tuple[float, float]]()
        for scored, agreed in reversed(self._pieces):
            if merged and merged[-1][0] + scored <= (after - merged[-1][0]) / PIECE_SHARE:
                scored, agreed = merged[-1][0] + scored, merged[-1][1] + agreed
                after -= merged.pop()[0]
            merged.append((scored, agreed))
            after += scored
        self._pieces = merged[::-1]
