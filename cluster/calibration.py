"""Draft probability to acceptance probability, learnt online (design, idea 6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.depth_counts import DepthCounts
from cluster.forest import Forest
from cluster.selection_of_few import path_probabilities
from engine.tree import TokenTree

NUM_BINS = 20
# Weight, in observations, of the prior that a draft probability is what it says.
PRIOR_WEIGHT = 8.0
MIDDLES = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
PRIOR = PRIOR_WEIGHT * MIDDLES
# Drafters are believed to be at most so much surer, or less sure, than they say.
LEAST_EXPONENT, MOST_EXPONENT = 0.25, 3.0
# Observations are halved once a bin holds this many, so that the estimate follows drifting traffic.
WINDOW = 2000.0
# And after so many steps in a row in which none of a drafter's drafts was worth verifying.
PASSED_OVER_STEPS = 32


@dataclass(slots=True)
class DrafterCalibration:
    """A monotone map from a node's conditional draft probability to its chance of acceptance.

    Observations are nodes whose parent was accepted; the estimate per bin is shrunk towards the
    drafter's own probability and made monotone over bins.
    """

    tried: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_BINS))
    accepted: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_BINS))
    _table: NDArray[np.float64] | None = None
    _plain_table: list[float] | None = None
    _exponent: float | None = None
    _num_passed_over: int = 0
    # Of the predictions since the start: how many, their sum, how many came true, squared errors.
    predictions: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))

    def observe(self, probabilities: NDArray[np.float64], accepted: NDArray[np.bool_]) -> None:
        """Fold in verified nodes: conditional draft probabilities [n] and what became of them [n]."""
        bins = _bins(probabilities)
        tried = np.bincount(bins, minlength=NUM_BINS)
        came_true = np.bincount(bins, weights=accepted, minlength=NUM_BINS)
        self._judge(tried, came_true)
        self.tried += tried
        self.accepted += came_true
        full = self.tried > WINDOW
        if np.count_nonzero(full):
            self.tried[full] /= 2
            self.accepted[full] /= 2
        self._table = self._plain_table = self._exponent = None
        self._num_passed_over = 0

    def passed_over(self) -> None:
        """Of a step's drafts none was verified: only that would have told that they are better by now."""
        self._num_passed_over += 1
        if self._num_passed_over >= PASSED_OVER_STEPS:
            self._num_passed_over = 0
            self.tried /= 2
            self.accepted /= 2
            self._table = self._plain_table = self._exponent = None

    def _judge(self, tried: NDArray[np.intp], came_true: NDArray[Any]) -> None:
        """Keep account of how good the table was, before it learns: counts by bin [NUM_BINS]."""
        table = self.table
        predicted, true = table @ tried, came_true.sum()
        # (p - 1)^2 where a token was accepted, p^2 where not.
        squared = (table * table) @ tried - 2.0 * (table @ came_true) + true
        self.predictions += (tried.sum(), predicted, true, squared)

    @property
    def table(self) -> NDArray[np.float64]:
        """float64 [NUM_BINS]: acceptance probability by bin of conditional draft probability."""
        if self._table is None:
            weight = self.tried + PRIOR_WEIGHT
            self._table = _monotone((self.accepted + PRIOR) / weight, weight)
        return self._table

    @property
    def plain_table(self) -> list[float]:
        """The same in plain numbers."""
        if self._plain_table is None:
            self._plain_table = self.table.tolist()
        return self._plain_table

    @property
    def exponent(self) -> float:
        """The power of a draft probability that comes nearest to the table, by least squares of logarithms.

        The power of a product is the product of powers: with this one number, whoever has but the
        probability of a path knows its chance.
        """
        if self._exponent is None:
            said, weight = np.log(MIDDLES), self.tried + PRIOR_WEIGHT
            slope = (weight * said) @ np.log(self.table) / ((weight * said) @ said)
            self._exponent = min(max(float(slope), LEAST_EXPONENT), MOST_EXPONENT)
        return self._exponent

    def apply(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """Acceptance probabilities [n] of nodes with these conditional draft probabilities [n]."""
        return self.table[_bins(probabilities)]


def _monotone(rate: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rates of bins made to rise, by least squares: neighbours that fall have their weighted mean.

    A running maximum instead would believe a bin of which nothing is known more than those that were seen.
    """
    if (rate[1:] >= rate[:-1]).all():
        return rate
    pools: list[tuple[float, float, int]] = []  # mean, weight, bins
    for mean, total in zip(rate.tolist(), weight.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] > mean:
            before, more, others = pools.pop()
            mean = (mean * total + before * more) / (total + more)
            total, count = total + more, count + others
        pools.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])


def _bins(probabilities: NDArray[np.float64]) -> NDArray[np.intp]:
    return np.minimum((probabilities * NUM_BINS).astype(np.intp), NUM_BINS - 1)


@dataclass(slots=True)
class Calibration:
    """One map per drafter kind.

    Attributes:
        kinds: of drafter instances, where that is not their own name; instances may be asked about.
        depths: how deep trees reach and are accepted.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    depths: DepthCounts = field(default_factory=DepthCounts)
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
        self.depths.count(forest, drafters, accepted)
        nodes = (forest.parent >= 0).nonzero()[0]
        nodes = nodes[accepted[forest.parent[nodes]]]
        for name, mine in _by_drafter(drafters, forest.request[nodes]):
            self.of(name).observe(forest.conditional[nodes[mine]], accepted[nodes[mine]])

    def selected(self, drafted: Iterable[tuple[str, int, int]]) -> None:
        """Which drafts of a step are verified: each tree's drafter, nodes drafted, nodes of those taken."""
        passed_over: set[str] = set()
        taken: set[str] = set()
        for drafter, num_drafted, num_taken in drafted:
            if num_taken:
                taken.add(drafter)
            elif num_drafted:
                passed_over.add(drafter)
        for drafter in passed_over - taken:
            self.of(drafter).passed_over()

    def forget(self, kind: str) -> None:
        """Drafters of this kind have other weights: what was learnt of it does not hold."""
        self._drafters.pop(kind, None)

    def predictions(self) -> dict[str, tuple[float, float, float, float]]:
        """By drafter kind: tokens predicted, sum of their chances, how many came true, squared errors."""
        found = {}
        for name, one in self._drafters.items():
            tried, predicted, true, squared = one.predictions.tolist()
            found[name] = (tried, predicted, true, squared)
        return found

    def path_probabilities(self, forest: Forest, drafters: Sequence[str]) -> NDArray[np.float64]:
        """float64 [nodes]: calibrated chance that each node is accepted; 1 at roots."""
        place = {name: index for index, name in enumerate(dict.fromkeys(drafters))}
        if len(place) == 1:
            conditional = self.of(drafters[0]).apply(forest.conditional)
        else:
            tables = np.stack([self.of(name).table for name in place])
            of_request = np.array([place[name] for name in drafters])
            conditional = tables[of_request[forest.request], _bins(forest.conditional)]
        conditional[forest.roots] = 1.0
        return forest.path_product(conditional)

    def path_probabilities_of_few(self, trees: Sequence[TokenTree], drafters: Sequence[str]) -> list[float]:
        """The same for few nodes, in plain numbers: [nodes], tree after tree."""
        return path_probabilities(trees, [self.of(drafter).plain_table for drafter in drafters])


def _by_drafter(
    drafters: Sequence[str], request: NDArray[np.int64]
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Pairs of a drafter's name and which of the nodes (given by their request's index) are its own."""
    names = sorted(set(drafters))
    if len(names) == 1:
        if len(request):
            yield names[0], np.ones(len(request), dtype=np.bool_)
        return
    code = np.array([names.index(drafter) for drafter in drafters])
    of_node = code[request]
    for index, name in enumerate(names):
        mine = of_node == index
        if mine.any():
            yield name, mine
