"""SpecInfer's static token tree, a baseline of AdaServe v1 (arXiv 2025, section 6.1): <1,1,3,1,1,1,1,1>."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.policies.base import DecodeRequest, Int32, StepContext, same_shape
from drafters.messages import DraftPlan
from engine.tree import TokenTree


class SpecInfer:
    """One tree shape for everybody, whatever the load; everything in it is verified, without a budget.

    `expansion[i]` is how many children each node of layer i has. A draft plan knows one width for all
    layers, so a beam as wide as the widest layer is drafted and the shape is taken from it by rank among
    siblings. Where the beam gave its places to other branches, the tree has fewer nodes than the shape.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._expansion = np.array(config.expansion)

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """As deep as the shape and as wide as its widest layer."""
        depth, width = len(self._expansion), int(np.cumprod(self._expansion).max())
        return same_shape(batch, depth, width)

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """Of each node selected, its `expansion[depth]` likeliest children."""
        if not batch:
            return []
        forest = Forest.of(trees)
        drafted = np.flatnonzero(forest.parent >= 0)
        widths = np.zeros(max(int(forest.depth.max()), len(self._expansion)), dtype=np.int64)
        widths[: len(self._expansion)] = self._expansion
        allowed = np.ones(forest.num_nodes)
        allowed[drafted] = sibling_rank(forest)[drafted] < widths[forest.depth[drafted] - 1]
        return forest.chosen_nodes(forest.path_product(allowed) > 0.0)


def sibling_rank(forest: Forest) -> NDArray[np.int64]:
    """int64 [nodes]: place among the children of its parent, the likeliest first, ties by index; roots 0."""
    rank = np.zeros(forest.num_nodes, dtype=np.int64)
    drafted = np.flatnonzero(forest.parent >= 0)
    order = drafted[np.lexsort((-forest.conditional[drafted], forest.parent[drafted]))]
    parents = forest.parent[order]
    rank[order] = np.arange(len(order)) - np.searchsorted(parents, parents)
    return rank
