"""Which candidate nodes are verified: AdaServe's two phases, and a budget found by marginal goodput.

Every function takes path probabilities that do not grow from parent to child, so taking the highest
first always yields connected trees; ties are broken by index, parents coming before children.

None of them orders all nodes: values are sorted or partitioned, which numpy does with vector instructions,
and nodes are then picked by comparing with the lowest value taken. `flotilla bench selection` measures it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster import selection_of_few
from cluster.forest import Forest
from cluster.phase_trace import phase
from cluster.selection_of_few import FEW_NODES, ROUNDING

Bool = NDArray[np.bool_]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@phase("slo-customized")
def slo_customized(
    forest: Forest,
    path_probability: Float64,
    required: Float64,
    max_nodes: int,
    budget: int,
    urgency: Float64 | None = None,
) -> Bool:
    """AdaServe (EuroSys 2026) step 2: meet each request's requirement, the most urgent first.

    Args:
        forest: candidate trees of the batch.
        path_probability: float64 [nodes], f(v); 1 at roots.
        required: float64 [requests], A_cap(r): tokens the request must get in this step.
        max_nodes: n_max, most drafted nodes for one request in this phase.
        budget: B, tokens of the verify step; every root costs one from the start.
        urgency: float64 [requests], what they are served in descending order of: A(r), line 9 of Algorithm 2;
            `required` if None.

    Returns:
        bool [nodes], the nodes chosen, roots included.
    """
    chosen = np.zeros(forest.num_nodes, dtype=np.bool_)
    chosen[forest.roots] = True
    left = budget - forest.num_requests
    urgency = required if urgency is None else urgency
    in_need = (required > 1.0 + ROUNDING).nonzero()[0]
    if left <= 0 or max_nodes <= 0 or len(in_need) == 0:
        return chosen
    if forest.num_nodes <= FEW_NODES:
        f_of, offsets = path_probability.tolist(), forest.offsets.tolist()
        few = selection_of_few.urgent(offsets, f_of, required.tolist(), max_nodes, left, urgency.tolist())
        chosen[few] = True
        return chosen
    urgent = in_need[(-urgency[in_need]).argsort(kind="stable")]
    start, drafted = forest.roots[urgent] + 1, forest.sizes[urgent] - 1
    f = _rows(path_probability, start, drafted)
    most = min(max_nodes, f.shape[1], left)
    if most <= 0:
        return chosen
    # How many of its best nodes each request needs, as if it were alone. The root counts one.
    best = -f
    best.sort(axis=1)
    best = -best[:, :most]
    short = 1.0 + best.cumsum(axis=1) < (required[urgent] - ROUNDING)[:, None]
    needed = np.minimum(np.minimum(1 + short.sum(axis=1), drafted), most)
    # The budget goes to them in order of urgency; the last to be served may get less than it needs.
    take = np.minimum(np.maximum(left - (needed.cumsum() - needed), 0), needed)
    served = take.nonzero()[0]
    f, start, take = f[served], start[served], take[served]
    lowest = best[served, take - 1][:, None]
    row, column = (f >= lowest).nonzero()
    # Of the nodes equal to the lowest one taken, the first are taken; padding comes after them.
    surplus = np.bincount(row, minlength=len(served)) - take
    if np.count_nonzero(surplus):
        ties = (f[row, column] == lowest[row, 0]).nonzero()[0]
        ties_of = np.bincount(row[ties], minlength=len(served))
        place = np.arange(len(ties)) - (np.cumsum(ties_of) - ties_of)[row[ties]]
        kept = np.ones(len(row), dtype=np.bool_)
        kept[ties[place >= (ties_of - surplus)[row[ties]]]] = False
        row, column = row[kept], column[kept]
    chosen[start[row] + column] = True
    return chosen


@phase("throughput-optimized")
def throughput_optimized(chosen: Bool, path_probability: Float64, budget: int) -> Bool:
    """AdaServe step 3: the rest of the budget goes to the highest path probabilities of all.

    Args:
        chosen: bool [nodes], chosen so far (closed under parent).
        path_probability: float64 [nodes], f(v).
        budget: B, tokens of the verify step in total.

    Returns:
        bool [nodes], a superset of `chosen` with at most max(budget, nodes chosen so far) nodes.
    """
    left = budget - int(np.count_nonzero(chosen))
    if left <= 0:
        return chosen
    rest = (~chosen).nonzero()[0]
    f = path_probability[rest]
    result = chosen.copy()
    if left < len(rest):
        result[rest[_highest(f, left, np.partition(f, len(f) - left)[len(f) - left])]] = True
    else:
        result[rest] = True
    return result


@phase("marginal-goodput")
def marginal_goodput(
    chosen: Bool, path_probability: Float64, base_s: float, token_s: float | Float64
) -> Bool:
    """Add the likeliest nodes, as many as give most expected tokens per second (design, "Beyond the papers").

    With E expected tokens so far in T seconds, a node of probability f that costs `token_s` raises E / T
    exactly when f / token_s > E / T. Where each costs at least what the one before it does, the first that
    does not pay ends it. Where further ones cost less, as in a mixture of experts, one that does not pay may
    be on the way to some that do, so all numbers of nodes are compared; of equals the fewest are taken.

    Args:
        chosen: bool [nodes], chosen so far.
        path_probability: float64 [nodes], expected acceptance of each node.
        base_s: seconds of the whole step (drafting, overhead, verification) with `chosen`.
        token_s: seconds one more token adds; or float64 [nodes not chosen]: what the first adds, the second,
            and so on.

    Returns:
        bool [nodes], a superset of `chosen`.
    """
    expected_now = float(path_probability[chosen].sum())
    num_left = len(chosen) - int(np.count_nonzero(chosen))
    if num_left == 0:
        return chosen
    costs = token_s if isinstance(token_s, np.ndarray) else np.full(num_left, token_s)
    if len(chosen) <= FEW_NODES:
        result, left = chosen.copy(), (~chosen).nonzero()[0].tolist()
        f_of = path_probability.tolist()
        result[selection_of_few.paying(left, f_of, expected_now, base_s, costs.tolist())] = True
        return result
    # The last one taken pays at what it costs and at the E / T that is reached, which is no less than now.
    rest = (~chosen & (path_probability * base_s > expected_now * costs.min())).nonzero()[0]
    if len(rest) == 0:
        return chosen
    f = path_probability[rest]
    descending = -f
    descending.sort()
    np.negative(descending, out=descending)
    goodput = np.empty(len(rest) + 1)
    goodput[0] = expected_now / base_s
    np.divide(expected_now + descending.cumsum(), base_s + costs[: len(rest)].cumsum(), out=goodput[1:])
    count = int(goodput.argmax())
    result = chosen.copy()
    if count > 0:
        result[rest[_highest(f, count, descending[count - 1])]] = True
    return result


def _highest(f: Float64, count: int, lowest: float) -> Int64:
    """Indices of the `count` highest values, `lowest` being the last of them; of equals the first."""
    at_least = (f >= lowest).nonzero()[0]
    surplus = len(at_least) - count
    if surplus == 0:
        return at_least
    ties = (f[at_least] == lowest).nonzero()[0]
    return np.delete(at_least, ties[len(ties) - surplus :])


def _rows(values: Float64, start: Int64, size: Int64) -> Float64:
    """Rows of `values` of the given starts and sizes as a matrix, padded with 0 at their ends."""
    width = int(size.max())
    columns = np.arange(width)
    index = start[:, None] + columns
    if int(size.min()) == width:
        return np.take(values, index)
    held = columns < size[:, None]
    return np.where(held, values[np.where(held, index, 0)], 0.0)
