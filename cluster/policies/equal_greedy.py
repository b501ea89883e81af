"""EqualGreedy: the budget in equal shares, each spent greedily (AdaServe v1, arXiv 2025, figure 8)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.forest import Forest
from cluster.policies.adaserve_v1 import FirstVersionShape
from cluster.policies.base import DecodeRequest, Int32, StepContext, hardware_budget
from engine.tree import TokenTree


class EqualGreedy(FirstVersionShape):
    """Every request verifies its highest path probabilities, as many as everybody else; blind to SLOs.

    What does not divide evenly goes to the first of the batch, one token each. A share that a small tree
    leaves over is not passed on.
    """

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """The `B / n` nodes of highest f(v) of each tree, its root included."""
        if not batch:
            return []
        forest, n = Forest.of(trees), len(batch)
        probability = forest.path_product(forest.conditional)
        share, rest = divmod(hardware_budget(self._config, n, context), n)
        shares = np.maximum(1, share + (np.arange(n) < rest))
        # Within a request the root comes first: f = 1 and the lowest index.
        order = np.lexsort((-probability, forest.request))
        rank = np.empty(forest.num_nodes, dtype=np.int64)
        rank[order] = np.arange(forest.num_nodes) - forest.offsets[forest.request[order]]
        return forest.chosen_nodes(rank < shares[forest.request])
