"""AdaServe: SLO-customized speculative decoding (EuroSys 2026)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.policies.base import DecodeRequest, Int32, StepContext, clip, hardware_budget, same_shape
from cluster.selection import Bool, Float64, slo_customized, throughput_optimized
from drafters.messages import DraftPlan
from engine.tree import TokenTree


class AdaServe:
    """Adaptive depth and width, then the two selection phases under the hardware budget.

    f(v) is the drafter's own path probability, as in the paper.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """`d = clip(floor(B1 / (n + c1)) - 1, D_min, D_max)`, `w = clip(floor(B2 / n) + c2, 1, W_max)`."""
        if not batch:
            return []
        config, n = self._config, len(batch)
        budget = hardware_budget(config, n, context)
        depth = clip(budget / (n + config.depth_offset) - 1, config.min_depth, config.max_depth)
        width = clip(config.draft_budget / n + config.width_offset, 1, config.max_width)
        return same_shape(batch, depth, width)

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """SLO-customized selection up to `A_cap(r) = min(A(r), d + 1)`, then throughput-optimized selection.

        Requests come in descending A(r), not A_cap(r) (Algorithm 2, line 9): who is later comes first, though
        neither may catch up in this step.
        """
        if not batch:
            return []
        forest = Forest.of(trees)
        probability = forest.path_product(forest.conditional)
        budget = hardware_budget(self._config, len(batch), context)
        required = np.array([request.required(context.step_s) for request in batch])
        capped = np.minimum(required, forest.depths + 1.0)
        chosen = slo_customized(forest, probability, capped, self._config.max_nodes, budget, urgency=required)
        return forest.chosen_nodes(self._fill(chosen, probability, budget))

    def _fill(self, chosen: Bool, probability: Float64, budget: int) -> Bool:
        """The second phase: what the budget leaves over goes to the likeliest nodes of the batch."""
        return throughput_optimized(chosen, probability, budget)
