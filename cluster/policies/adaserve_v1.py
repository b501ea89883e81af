"""AdaServe, first version (arXiv 2025): its rule for depth and width (eq. 8, 9)."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import PolicyConfig
from cluster.policies.adaserve import AdaServe
from cluster.policies.base import DecodeRequest, Int32, StepContext, clip, hardware_budget, same_shape
from drafters.messages import DraftPlan
from engine.tree import TokenTree


class FirstVersionShape:
    """Planning of the first version and of its baselines; one budget B gives depth and width."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """`d = max(1, min(D_max, ceil(B / n)))`, `w = max(1, min(W_max, floor(B / n)))` (eq. 8, 9).

        `D_max` of 0 drafts nothing, which the paper does not provide for.
        """
        if not batch:
            return []
        n = len(batch)
        budget = hardware_budget(self._config, n, context)
        depth = min(self._config.max_depth, max(1, -(-budget // n)))
        return same_shape(batch, depth, clip(budget // n, 1, self._config.max_width))


class AdaServeV1(FirstVersionShape):
    """Selection is that of the published version."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._published = AdaServe(config)

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """SLO-customized selection, then throughput-optimized selection."""
        return self._published.select(batch, trees, context)
