"""SpecServe (2025): draft length by confidence, per step and per request; Algorithms 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.policies.base import DecodeRequest, Int32, StepContext
from cluster.policies.goodput import Float64, Int64, StepTimes, chain_limits
from drafters.messages import DraftPlan
from engine.tree import TokenTree

# Estimated efficiency of a step, from its expected tokens, layers drafted and draft tokens verified.
Estimator = Callable[[float, int, int], float]

# Estimate of a step that takes longer than the objective (Algorithm 3).
BEYOND_OBJECTIVE = -1.0
# Weight of the newest step in the historical mean confidence.
SMOOTHING = 0.1


class SpecServe:
    """Adaptive drafter, confidence-prior verifier and SLO-aware estimator, for chains.

    What this protocol cannot express yet is the rule inside the draft loop: Algorithm 1 corrects its
    estimate with the real confidences after every layer and stops there. A policy is asked once before
    drafting, so the depth is chosen by Algorithm 1 with the historical mean confidence standing in for
    the real ones; the pruning of Algorithm 2 then works with the real ones. A deeper draft than
    the mean suggests is thus never made, a shallower one only as far as verification is concerned.

    The historical mean is kept per drafter; until its first draft is seen, the estimated acceptance rate
    is used. The paper has one TPOT objective; here it is the strictest in the batch.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._max_depth = config.max_depth
        self._mean_confidence: dict[str, float] = {}

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """One depth for all, found by Algorithm 1 on the historical mean confidence."""
        if not batch:
            return []
        n, limits = len(batch), chain_limits(batch, self._max_depth)
        times, tpot_s = StepTimes.of(batch, self._max_depth, context), strictest(batch)

        def estimate(tokens: float, depth: int, num_drafted: int) -> float:
            return slo_aware_estimate(tokens, times.seconds(depth, num_drafted), tpot_s)

        expected = np.array([self._mean_confidence.get(request.drafter, request.rate) for request in batch])
        depth = len(
            adaptive_drafter(
                lambda layer: expected, expected, limits, estimate, best=estimate(float(n), 0, 0)
            )
        )
        return [DraftPlan(depth=min(depth, limit)) for limit in limits.tolist()]

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """Algorithm 2 under the estimator of Algorithm 3."""
        if not batch:
            return []
        forest = Forest.of(trees)
        self._observe(forest, batch)
        n, num_context = len(batch), sum(request.num_context for request in batch)
        base_s = context.draft_s + context.draft_overhead_s + context.cost.verify_seconds(n, n, num_context)
        token_s, tpot_s = context.cost.verify_token_seconds(num_context / n), strictest(batch)

        def estimate(tokens: float, depth: int, num_drafted: int) -> float:
            return slo_aware_estimate(tokens, base_s + token_s * num_drafted, tpot_s)

        acceptance = forest.path_product(forest.conditional)
        drafted = np.flatnonzero(forest.parent >= 0)
        kept = confidence_prior(acceptance[drafted], n, int(forest.depth.max()), estimate)
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


def slo_aware_estimate(tokens: float, step_s: float, tpot_s: float | None) -> float:
    """Algorithm 3: expected tokens per second, or -1 for a step longer than the objective.

    The worst case counts, one token per step: then the step's seconds are the request's TPOT.
    """
    if tpot_s is not None and step_s > tpot_s:
        return BEYOND_OBJECTIVE
    return tokens / step_s


def adaptive_drafter(
    draft_layer: Callable[[int], Float64],
    mean_confidence: Float64,
    limits: Int64,
    estimate: Estimator,
    best: float = BEYOND_OBJECTIVE,
) -> list[Float64]:
    """Algorithm 1: draft another layer while the predicted estimate rises; then put in what came of it.

    The next layer's acceptance is predicted as that of the last one times the mean confidence (eq. 8);
    the listing (lines 3, 19) appends the mean alone, which overrates every layer but the first.

    Args:
        draft_layer: drafts layer 1, 2, ... and returns the confidences, float64 [requests].
        mean_confidence: float64 [requests], historical mean confidence.
        limits: int64 [requests], most tokens each may draft.
        estimate: efficiency of a step.
        best: what the first layer must exceed. -1 as in the paper drafts at least one layer unless it
            would take longer than the objective; the estimate of plain decoding allows none.

    Returns:
        AR of each layer drafted, float64 [requests]; 0 where a request was at its limit.
    """
    acceptance = np.ones(len(limits))
    tokens, num_drafted = float(len(limits)), 0
    layers: list[Float64] = []
    for depth in range(1, int(limits.max(initial=0)) + 1):
        active = limits >= depth
        count = num_drafted + int(active.sum())
        predicted = float((acceptance * mean_confidence)[active].sum())
        if estimate(tokens + predicted, depth, count) <= best:
            break
        acceptance = np.where(active, acceptance * draft_layer(depth), 0.0)
        layers.append(acceptance)
        tokens, num_drafted = tokens + float(acceptance.sum()), count
        best = estimate(tokens, depth, num_drafted)
    return layers


def confidence_prior(acceptance: Float64, num_requests: int, depth: int, estimate: Estimator) -> Int64:
    """Algorithm 2: drop draft tokens in ascending AR while the estimate rises.

    The listing also stops where dropping one token leaves the step longer than the objective; here
    dropping goes on until the step is short enough, or nothing is left.

    Args:
        acceptance: float64 [drafted], AR of each draft token, parents before their children.
        num_requests: roots, which count one token each.
        depth: layers that were drafted.
        estimate: efficiency of a step.

    Returns:
        int64, ascending: indices of the draft tokens to verify. Of equal AR the last is dropped first.
    """
    order = np.argsort(-acceptance, kind="stable")
    tokens = num_requests + np.concatenate([[0.0], np.cumsum(acceptance[order])])
    kept = len(order)
    best = estimate(float(tokens[kept]), depth, kept)
    while kept > 0:
        value = estimate(float(tokens[kept - 1]), depth, kept - 1)
        if value <= best and best != BEYOND_OBJECTIVE:
            break
        best, kept = value, kept - 1
    return np.sort(order[:kept])
