"""The phases of `cluster.selection` for few nodes, in plain numbers, which take less time than arrays then.

With one request a step selects among half a dozen nodes. An operation on an array takes a microsecond however
few they are, and several where its code and its data have to come from memory, as after every forward of the
target on the same core; the same arithmetic of plain numbers takes a tenth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import exp

import numpy as np
from numpy.typing import NDArray

from engine.tree import TokenTree

Int32 = NDArray[np.int32]

# Up to so many nodes.
FEW_NODES = 48
# Sums of probabilities are rounded: a requirement is met when this little is missing.
ROUNDING = 1e-12


def path_probabilities(trees: Iterable[TokenTree], tables: Iterable[Sequence[float]]) -> list[float]:
    """The chance that each node is accepted, tree after tree; 1 at roots.

    Args:
        trees: as documented, which is checked elsewhere.
        tables: of each tree, acceptance probability by bin of conditional draft probability.
    """
    found: list[float] = []
    for tree, table in zip(trees, tables, strict=True):
        logp, parent, num_bins = tree.logp.tolist(), tree.parent.tolist(), len(table)
        start = len(found)
        found.append(1.0)
        for node in range(1, len(parent)):
            above = parent[node]
            step = logp[node] - logp[above]
            place = int(exp(step) * num_bins) if step < 0.0 else num_bins
            found.append(found[start + above] * table[place if place < num_bins else -1])
    return found


def urgent(
    offsets: Sequence[int],
    path_probability: Sequence[float],
    required: Sequence[float],
    max_nodes: int,
    left: int,
    urgency: Sequence[float] | None = None,
) -> list[int]:
    """Nodes of the SLO phase, as of `selection.slo_customized`; `left` tokens are left beside the roots.

    Args:
        offsets: [requests + 1], where each tree's nodes begin.
        path_probability: [nodes].
        required: [requests].
        max_nodes: most drafted nodes for one request.
        left: most for all.
        urgency: [requests], what they are served in descending order of; `required` if None.
    """
    found: list[int] = []
    if left <= 0 or max_nodes <= 0:
        return found
    in_need = [request for request, tokens in enumerate(required) if tokens > 1.0 + ROUNDING]
    order = required if urgency is None else urgency
    in_need.sort(key=lambda request: -order[request])
    for request in in_need:
        nodes = sorted(
            range(offsets[request] + 1, offsets[request + 1]), key=lambda node: -path_probability[node]
        )
        tokens, short_of = 1.0, required[request] - ROUNDING
        for node in nodes[: min(max_nodes, left)]:
            if tokens >= short_of:
                break
            found.append(node)
            tokens += path_probability[node]
            left -= 1
        if left == 0:
            break
    return found


def paying(
    rest: Iterable[int],
    path_probability: Sequence[float],
    expected: float,
    base_s: float,
    costs: Iterable[float],
) -> list[int]:
    """Of `rest`, the likeliest nodes: as many as give most expected tokens per second, of equals the fewest.

    As of `selection.marginal_goodput`: `expected` tokens in `base_s` seconds without them, and what the first
    adds to these, the second, and so on.
    """
    ordered = sorted(rest, key=lambda node: -path_probability[node])
    count, most, least_s = 0, expected, base_s
    for number, (node, cost) in enumerate(zip(ordered, costs, strict=False), 1):
        expected += path_probability[node]
        base_s += cost
        if expected * least_s > most * base_s:
            count, most, least_s = number, expected, base_s
    return ordered[:count]


def by_tree(offsets: Sequence[int], chosen: Iterable[int]) -> list[Int32]:
    """Per tree, the indices within it of the nodes chosen, ascending; as of `Forest.chosen_nodes`."""
    ordered = sorted(chosen)
    return [
        np.array([node - start for node in ordered if start <= node < end], dtype=np.int32)
        for start, end in pairwise(offsets)
    ]
