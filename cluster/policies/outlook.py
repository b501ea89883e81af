"""What a step with drafts is predicted to be beside a plain one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Depths of which one brings so much of what the other does are alike, as far as predictions go. To change
# between them in every step costs: three layers bring more than two in one step and four in the next.
ALIKE = 0.98


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the next step is predicted to be, with drafts for everybody and without.

    Attributes:
        depth: of the drafts with the highest goodput, from 1 on; 0 where nobody can draft.
        drafted: expected tokens per second with them, by the seconds that decoding pays for; 0 likewise.
        drafted_s: seconds of such a step, prompts apart; 0 likewise.
        draft_s: seconds of that which drafting takes.
        plain: tokens per second without drafts.
        plain_s: seconds of such a step.
        by_rates: tokens per second of the whole step with drafts, by acceptance rates and costs alone.
        by_depth: tokens per second with drafts of each depth from 0 on, as far as they were worked out.
    """

    depth: int
    drafted: float
    drafted_s: float
    draft_s: float
    plain: float
    plain_s: float
    by_rates: float
    by_depth: Sequence[float]

    def steady_depth(self, before: int) -> int:
        """The depth that was planned before, while it brings about as much as the best; else that."""
        by_depth = self.by_depth
        if 0 < before < len(by_depth) and by_depth[before] >= ALIKE * by_depth[self.depth]:
            return before
        return self.depth
