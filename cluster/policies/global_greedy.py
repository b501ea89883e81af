"""GlobalGreedy: the budget to the best nodes of all trees (AdaServe v1, arXiv 2025, figure 8)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.forest import Forest
from cluster.policies.adaserve_v1 import FirstVersionShape
from cluster.policies.base import DecodeRequest, Int32, StepContext, hardware_budget
from cluster.selection import throughput_optimized
from engine.tree import TokenTree


class GlobalGreedy(FirstVersionShape):
    """AdaServe without its SLO-customized phase: throughput-optimized selection alone."""

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """All roots, then the highest f(v) of the batch until B tokens."""
        if not batch:
            return []
        forest = Forest.of(trees)
        probability = forest.path_product(forest.conditional)
        roots = np.zeros(forest.num_nodes, dtype=np.bool_)
        roots[forest.roots] = True
        budget = hardware_budget(self._config, len(batch), context)
        return forest.chosen_nodes(throughput_optimized(roots, probability, budget))
