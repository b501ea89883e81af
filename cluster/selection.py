"""Which candidate nodes are verified: AdaServe's two phases, and a budget found by marginal goodput.

Every function takes path probabilities that do not grow from parent to child, so taking the highest
first always yields connected trees; ties are broken by index, parents coming before children.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster.forest import Forest

Bool = NDArray[np.bool_]
Float64 = NDArray[np.float64]


def slo_customized(
    forest: Forest, path_probability: Float64, required: Float64, max_nodes: int, budget: int
) -> Bool:
    """AdaServe (EuroSys 2026) step 2: meet each request's requirement, the most urgent first.

    Args:
        forest: candidate trees of the batch.
        path_probability: float64 [nodes], f(v); 1 at roots.
        required: float64 [requests], A_cap(r): tokens the request must get in this step.
        max_nodes: n_max, most drafted nodes for one request in this phase.
        budget: B, tokens of the verify step; every root costs one from the start.

    Returns:
        bool [nodes], the nodes chosen, roots included.
    """
    chosen = np.zeros(forest.num_nodes, dtype=np.bool_)
    chosen[forest.roots] = True
    left = budget - forest.num_requests
    if left <= 0:
        return chosen
    order = np.lexsort((-path_probability, forest.request))
    # Within a request the root comes first (f = 1, lowest index), then drafted nodes by descending f.
    total = np.cumsum(path_probability[order])
    for index in np.argsort(-required, kind="stable"):
        if left <= 0 or required[index] <= 1.0:
            break
        start, end = forest.offsets[index], forest.offsets[index + 1]
        before = total[start] - path_probability[order[start]]
        # The first place where the expected number of tokens reaches the requirement.
        reached = int(np.searchsorted(total[start:end] - before, required[index] - 1e-12)) + 1
        take = min(reached - 1, end - start - 1, max_nodes, left)
        chosen[order[start + 1 : start + 1 + take]] = True
        left -= take
    return chosen


def throughput_optimized(chosen: Bool, path_probability: Float64, budget: int) -> Bool:
    """AdaServe step 3: the rest of the budget goes to the highest path probabilities of all.

    Args:
        chosen: bool [nodes], chosen so far (closed under parent).
        path_probability: float64 [nodes], f(v).
        budget: B, tokens of the verify step in total.

    Returns:
        bool [nodes], a superset of `chosen` with at most max(budget, nodes chosen so far) nodes.
    """
    left = budget - int(chosen.sum())
    if left <= 0:
        return chosen
    rest = np.flatnonzero(~chosen)
    best = rest[np.argsort(-path_probability[rest], kind="stable")[:left]]
    result = chosen.copy()
    result[best] = True
    return result


def marginal_goodput(chosen: Bool, path_probability: Float64, base_s: float, token_s: float) -> Bool:
    """Add the next-best node while expected tokens per second rise (design, "Beyond the papers").

    With E expected tokens so far in T seconds, a node of probability f that costs `token_s` raises E / T
    exactly when f / token_s > E / T. Nodes come in descending f, so the first that does not pay ends it.

    Args:
        chosen: bool [nodes], chosen so far.
        path_probability: float64 [nodes], expected acceptance of each node.
        base_s: seconds of the whole step (drafting, overhead, verification) with `chosen`.
        token_s: seconds one more token adds.

    Returns:
        bool [nodes], a superset of `chosen`.
    """
    rest = np.flatnonzero(~chosen)
    if len(rest) == 0:
        return chosen
    rest = rest[np.argsort(-path_probability[rest], kind="stable")]
    f = path_probability[rest]
    expected = float(path_probability[chosen].sum()) + np.concatenate([[0.0], np.cumsum(f)[:-1]])
    seconds = base_s + token_s * np.arange(len(rest))
    pays = f * seconds > expected * token_s
    count = len(rest) if pays.all() else int(np.argmin(pays))
    result = chosen.copy()
    result[rest[:count]] = True
    return result
