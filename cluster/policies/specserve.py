"""SpecServe (2025): draft length by confidence, per step and per request; Algorithms 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.config import PolicyConfig
from cluster.cost_model import VERIFY_DRAFTED
from cluster.forest import Forest
from cluster.policies.base import DecodeRequest, Int32, StepContext
from cluster.policies.goodput import Float64, Int64, chain_limits
from cluster.policies.planned_early import PlannedEarly
from drafters.messages import DraftPlan
from engine.stop_rules import BEYOND_OBJECTIVE, AdaptiveDrafter, EstimateRule, slo_aware_estimate
from engine.tree import TokenTree

# Estimated efficiency of a step, from its expected tokens and the draft tokens verified.
Estimator = Callable[[float, int], float]

# Weight of the newest step in the historical mean confidence.
SMOOTHING = 0.1


class SpecServe(PlannedEarly):
    """Adaptive drafter, confidence-prior verifier and SLO-aware estimator, for chains.

    The adaptive drafter (Algorithm 1) runs inside the drafters, which get with every call what its estimate
    needs (`stop_rule`); only its first prediction, which needs no draft, is made here. Several drafters
    serving one batch decide each for itself, as if the requests of the others were not drafted for; the
    confidence-prior verifier (Algorithm 2) then sees the drafts of all.

    The historical mean is kept per drafter; until its first draft is seen, the estimated acceptance rate
    is used. The paper has one TPOT objective; here it is the strictest in the batch.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._max_depth = config.max_depth
        self._mean_confidence: dict[str, float] = {}

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """As deep as allowed, or nothing where the first layer already makes the step too long."""
        limits = chain_limits(batch, self._max_depth).tolist()
        drafting: dict[str, int] = {}
        for request, limit in zip(batch, limits, strict=True):
            if limit > 0:
                drafting[request.drafter] = drafting.get(request.drafter, 0) + 1
        starts = set()
        for name, count in drafting.items():
            adaptive = AdaptiveDrafter(self.stop_rule(name, count, batch, context))
            if adaptive.pays([1.0] * count):
                starts.add(name)
        return [
            DraftPlan(depth=limit if request.drafter in starts else 0)
            for request, limit in zip(batch, limits, strict=True)
        ]

    def stop_rule(
        self, drafter: str, num_drafting: int, batch: Sequence[DecodeRequest], context: StepContext
    ) -> EstimateRule:
        """What the estimate of Algorithm 3 needs of the cost model, in plain numbers."""
        n, cost, target = len(batch), context.cost, context.cost.profile.target
        mine = [request for request in batch if request.drafter == drafter]
        rate = sum(request.rate for request in mine) / len(mine)
        # Not every request that a drafter is responsible for is in its call.
        drafting_context = sum(request.num_context for request in mine) * num_drafting // len(mine)
        num_context = sum(request.num_context for request in batch)
        # Of calls of several layers: those of one are corrected apart.
        two_s, three_s = (cost.draft_seconds(drafter, num_drafting, 1, k, drafting_context) for k in (2, 3))
        correction = cost.correction(VERIFY_DRAFTED)
        return EstimateRule(
            num_requests=n,
            base_s=context.draft_overhead_s + cost.verify_seconds(n, n, num_context, drafted=True),
            first_layer_s=2 * two_s - three_s,
            layer_s=three_s - two_s,
            token_s=(target.gamma + target.beta * num_context / n) * correction,
            knee=max(0.0, target.knee_tokens - n),
            past_knee_s=target.gamma_knee * correction,
            experts_s=target.unread_s(n) * correction,
            expert_share=target.expert_share,
            mean_confidence=self._mean_confidence.get(drafter, rate),
            tpot_s=strictest(batch),
        )

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """Algorithm 2 under the estimator of Algorithm 3."""
        if not batch:
            return []
        forest = Forest.of(trees)
        self._observe(forest, batch)
        n, num_context = len(batch), sum(request.num_context for request in batch)
        cost, tpot_s = context.cost, strictest(batch)
        base_s = context.draft_s + context.draft_overhead_s

        def estimate(tokens: float, num_drafted: int) -> float:
            verify_s = cost.verify_seconds(n, n + num_drafted, num_context, drafted=True)
            return slo_aware_estimate(tokens, base_s + verify_s, tpot_s)

        acceptance = forest.path_product(forest.conditional)
        drafted = np.flatnonzero(forest.parent >= 0)
        kept = confidence_prior(acceptance[drafted], n, estimate)
        chosen = np.zeros(forest.num_nodes, dtype=np.bool_)
        chosen[forest.roots] = True
        chosen[drafted[kept]] = True
        return forest.chosen_nodes(chosen)

    def _observe(self, forest: Forest, batch: Sequence[DecodeRequest]) -> None:
        """Fold the confidences of these drafts into the historical means."""
        drafted = np.flatnonzero(forest.parent >= 0)
        drafters = np.array([request.drafter for request in batch])[forest.request[drafted]]
        for name in sorted(set(drafters.tolist())):
            mean = float(forest.conditional[drafted[drafters == name]].mean())
            before = self._mean_confidence.get(name, mean)
            self._mean_confidence[name] = before + SMOOTHING * (mean - before)


def strictest(batch: Sequence[DecodeRequest]) -> float | None:
    """Least TPOT objective of the batch, in seconds; None where nobody has one."""
    return min((request.tpot_s for request in batch if request.tpot_s is not None), default=None)


def confidence_prior(acceptance: Float64, num_requests: int, estimate: Estimator) -> Int64:
    """Algorithm 2: drop draft tokens in ascending AR while the estimate rises.

    The listing also stops where dropping one token leaves the step longer than the objective; here
    dropping goes on until the step is short enough, or nothing is left.

    Args:
        acceptance: float64 [drafted], AR of each draft token, parents before their children.
        num_requests: roots, which count one token each.
        estimate: efficiency of a step.

    Returns:
        int64, ascending: indices of the draft tokens to verify. Of equal AR the last is dropped first.
    """
    order = np.argsort(-acceptance, kind="stable")
    tokens = num_requests + np.concatenate([[0.0], np.cumsum(acceptance[order])])
    kept = len(order)
    best = estimate(float(tokens[kept]), kept)
    while kept > 0:
        value = estimate(float(tokens[kept - 1]), kept - 1)
        if value <= best and best != BEYOND_OBJECTIVE:
            break
        best, kept = value, kept - 1
    return np.sort(order[:kept])
