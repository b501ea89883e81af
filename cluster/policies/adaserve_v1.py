"""AdaServe, first version (arXiv 2025): its rule for depth and width (eq. 8, 9)."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import PolicyConfig
from cluster.policies.adaserve import AdaServe
from cluster.policies.base import DecodeRequest, Int32, StepContext, clip
from drafters.messages import DraftPlan
from engine.tree import TokenTree


class AdaServeV1:
    """One budget B gives depth and width; selection is that of the published version."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._published = AdaServe(config)

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """The same shape for all, within each request's limits."""
        return v1_plans(batch, self._config, hardware_budget(self._config, len(batch), context))

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """SLO-customized selection, then throughput-optimized selection."""
        return self._published.select(batch, trees, context)


def hardware_budget(config: PolicyConfig, num_requests: int, context: StepContext) -> int:
    """B, tokens of a verify step: as configured, else the knee of the measured roofline."""
    return config.verify_budget or context.cost.knee(num_requests)


def v1_plans(batch: Sequence[DecodeRequest], config: PolicyConfig, budget: int) -> list[DraftPlan]:
    """`d = max(1, min(D_max, ceil(B / n)))`, `w = max(1, min(W_max, floor(B / n)))` (eq. 8, 9).

    `D_max` of 0 drafts nothing, which the paper does not provide for.
    """
    if not batch:
        return []
    n = len(batch)
    depth = min(config.max_depth, max(1, -(-budget // n)))
    width = clip(budget // n, 1, config.max_width)
    return [
        DraftPlan(depth=min(depth, request.max_draft), width=min(width, request.max_width))
        for request in batch
    ]
