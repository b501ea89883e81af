"""How deep draft trees reach, and how deep they are accepted, by kind of drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.forest import Forest

Int64 = NDArray[np.int64]

#: Layers told apart; deeper ones count as the last.
NUM_DEPTHS = 33


@dataclass(slots=True)
class DepthCounts:
    """Verified draft trees since the start, by drafter.

    Attributes:
        reached: int64 [NUM_DEPTHS], trees whose deepest node is at a depth.
        accepted: int64 [NUM_DEPTHS], trees whose accepted path ends at a depth.
    """

    reached: dict[str, Int64] = field(default_factory=dict)
    accepted: dict[str, Int64] = field(default_factory=dict)

    def count(self, forest: Forest, drafters: Sequence[str], accepted: NDArray[np.bool_]) -> None:
        """Take verified trees in; arguments as of `Calibration.observe`."""
        depths = np.minimum(np.maximum.reduceat(forest.depth, forest.roots), NUM_DEPTHS - 1)
        lengths = np.minimum(np.add.reduceat(accepted, forest.roots, dtype=np.int64) - 1, NUM_DEPTHS - 1)
        names = set(drafters)
        for name in names:
            mine = slice(None) if len(names) == 1 else np.array([drafter == name for drafter in drafters])
            if name not in self.reached:
                self.reached[name] = np.zeros(NUM_DEPTHS, dtype=np.int64)
                self.accepted[name] = np.zeros(NUM_DEPTHS, dtype=np.int64)
            self.reached[name] += np.bincount(depths[mine], minlength=NUM_DEPTHS)
            self.accepted[name] += np.bincount(lengths[mine], minlength=NUM_DEPTHS)

    def by_depth(self, drafter: str) -> list[tuple[int, int, int]]:
        """Depth from 1 on, trees that reach it, and trees accepted there; up to the deepest."""
        reached = np.cumsum(self.reached[drafter][::-1])[::-1]
        accepted = np.cumsum(self.accepted[drafter][::-1])[::-1]
        return [(d, int(reached[d]), int(accepted[d])) for d in range(1, NUM_DEPTHS) if reached[d]]
