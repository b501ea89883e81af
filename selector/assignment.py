"""Maximum-weight matching of requests to drafters with capacities, and what one more place would be worth.

SPIN solves eq. 10 with the Kuhn-Munkres algorithm on a graph in which drafter j stands B_j times; here SciPy
does, with Crouse's form of the Jonker-Volgenant algorithm, and a request may be left without a drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

# Column of a request without a drafter.
NONE = -1
# Of the greatest gain: what moves leave over that make up for each other but for rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Matching:
    """Who drafts for whom.

    Attributes:
        columns: int64 [n], drafter of each request or NONE.
        value: sum of the weights, those of requests without a drafter included.
    """

    columns: Int64
    value: float


def match(weights: Float64, capacities: Int64, none: Float64 | float = 0.0) -> Matching:
    """The matching of greatest weight; deterministic, and a request gets no drafter that gains it nothing.

    Args:
        weights: float64 [n, m], of each request on each drafter; -inf where it may not be used.
        capacities: int64 [m], requests each drafter takes at most.
        none: float64 [n] or one number, weight of having no drafter.
    """
    gains = _gains(weights, none)
    columns = np.full(len(gains), NONE, dtype=np.int64)
    # A drafter stands as often as it has places, but never more often than there are requests.
    places = np.repeat(np.arange(gains.shape[1]), np.clip(capacities, 0, len(gains)))
    if len(places):
        rows, chosen = linear_sum_assignment(gains[:, places], maximize=True)
        columns[rows] = places[chosen]
        columns[gains[np.arange(len(gains)), columns] <= 0.0] = NONE
    taken = np.flatnonzero(columns != NONE)
    base = float(np.broadcast_to(np.asarray(none, dtype=np.float64), (len(gains),)).sum())
    return Matching(columns, base + float(gains[taken, columns[taken]].sum()))


def capacity_prices(weights: Float64, columns: Int64, none: Float64 | float = 0.0) -> Float64:
    """Growth of the greatest weight by one more place on each drafter (float64 [m]), exactly.

    The new place sets off a chain: a request moves into it, another into the place that became free, and so
    on until somebody without a drafter moves up or a place stays free. The best chain is a longest path over
    drafters. A matching of greatest weight leaves no cycle that gains, so m rounds of Bellman-Ford find it.

    Args:
        weights: as for `match`.
        columns: int64 [n], of a matching of greatest weight.
        none: as for `match`.
    """
    gains = _gains(weights, none)
    num_drafters = gains.shape[1]
    prices = np.zeros(num_drafters)
    waiting = gains[columns == NONE]
    if len(waiting):
        prices = np.maximum(prices, waiting.max(axis=0))
    # moves[j, k]: what the best mover from drafter k to drafter j gains.
    moves = np.full((num_drafters, num_drafters), -np.inf)
    for k in range(num_drafters):
        served = gains[columns == k]
        if len(served):
            moves[:, k] = (served - served[:, k : k + 1]).max(axis=0)
    for _ in range(num_drafters):
        longer = np.maximum(prices, (moves + prices).max(axis=1, initial=0.0))
        if np.array_equal(longer, prices):
            break
        prices = longer
    # Requests alike are tied, and a place that brings nothing must not seem to bring something for ever.
    prices[prices <= _ROUNDING * gains.max(initial=0.0)] = 0.0
    return prices


def _gains(weights: Float64, none: Float64 | float) -> Float64:
    """Weights above having no drafter. Below that nobody takes one, so zero stands for no drafter as well."""
    base = np.broadcast_to(np.asarray(none, dtype=np.float64), (weights.shape[0],))
    gains: Float64 = np.maximum(weights - base[:, None], 0.0)
    return gains
