"""Draft probability to acceptance probability, learnt online (design, idea 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.forest import Forest

NUM_BINS = 20
# Weight, in observations, of the prior that a draft probability is what it says.
PRIOR_WEIGHT = 8.0
# Observations are halved once a bin holds this many, so that the estimate follows drifting traffic.
WINDOW = 2000.0


@dataclass(slots=True)
class DrafterCalibration:
    """A monotone map from a node's conditional draft probability to its chance of acceptance.

    Observations are nodes whose parent was accepted; the estimate per bin is shrunk towards the
    drafter's own probability and made monotone over bins.
    """

    tried: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_BINS))
    accepted: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_BINS))
    _table: NDArray[np.float64] | None = None

    def observe(self, probabilities: NDArray[np.float64], accepted: NDArray[np.bool_]) -> None:
        """Fold in verified nodes: conditional draft probabilities [n] and what became of them [n]."""
        bins = _bins(probabilities)
        np.add.at(self.tried, bins, 1.0)
        np.add.at(self.accepted, bins, accepted.astype(np.float64))
        full = self.tried > WINDOW
        if full.any():
            self.tried[full] /= 2
            self.accepted[full] /= 2
        self._table = None

    @property
    def table(self) -> NDArray[np.float64]:
        """float64 [NUM_BINS]: acceptance probability by bin of conditional draft probability."""
        if self._table is None:
            centre = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
            rate = (self.accepted + PRIOR_WEIGHT * centre) / (self.tried + PRIOR_WEIGHT)
            self._table = np.maximum.accumulate(rate)
        return self._table

    def apply(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """Acceptance probabilities [n] of nodes with these conditional draft probabilities [n]."""
        return self.table[_bins(probabilities)]


def _bins(probabilities: NDArray[np.float64]) -> NDArray[np.intp]:
    return np.minimum((probabilities * NUM_BINS).astype(np.intp), NUM_BINS - 1)


@dataclass(slots=True)
class Calibration:
    """One map per drafter kind.

    Attributes:
        kinds: of drafter instances, where that is not their own name; instances may be asked about.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    _drafters: dict[str, DrafterCalibration] = field(default_factory=dict)

    def of(self, drafter: str) -> DrafterCalibration:
        """The map of the drafter's kind, made on first use."""
        return self._drafters.setdefault(self.kinds.get(drafter, drafter), DrafterCalibration())

    def observe(self, forest: Forest, drafters: Sequence[str], accepted: NDArray[np.bool_]) -> None:
        """Learn from verified draft trees.

        Args:
            forest: the draft trees.
            drafters: who drafted each of them [requests].
            accepted: bool [nodes], nodes on the accepted path, roots included.
        """
        nodes = np.flatnonzero(forest.parent >= 0)
        nodes = nodes[accepted[forest.parent[nodes]]]
        for name, mine in _by_drafter(drafters, forest.request[nodes]):
            self.of(name).observe(forest.conditional[nodes[mine]], accepted[nodes[mine]])

    def path_probabilities(self, forest: Forest, drafters: Sequence[str]) -> NDArray[np.float64]:
        """float64 [nodes]: calibrated chance that each node is accepted; 1 at roots."""
        place = {name: index for index, name in enumerate(dict.fromkeys(drafters))}
        tables = np.stack([self.of(name).table for name in place])
        of_request = np.array([place[name] for name in drafters])
        conditional = tables[of_request[forest.request], _bins(forest.conditional)]
        conditional[forest.roots] = 1.0
        return forest.path_product(conditional)


def _by_drafter(
    drafters: Sequence[str], request: NDArray[np.int64]
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Pairs of a drafter's name and which of the nodes (given by their request's index) are its own."""
    names = sorted(set(drafters))
    code = np.array([names.index(drafter) for drafter in drafters])
    of_node = code[request]
    for index, name in enumerate(names):
        mine = of_node == index
        if mine.any():
            yield name, mine
