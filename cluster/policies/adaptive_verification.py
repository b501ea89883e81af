"""vLLM's adaptive verification (2026, pull requests 47808 and 52228): one budget for all draft slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.policies.base import DecodeRequest, Int32, StepContext
from cluster.policies.goodput import added_seconds, best_prefix
from drafters.messages import DraftPlan
from engine.tree import TokenTree


class AdaptiveVerification:
    """Draft slots of chains ranked by survival probability; as many as maximise tokens per second.

    `B* = argmax over B of (N + sum of the B highest S) / (draft cost + verify cost of N + B tokens)`, with
    S the product of acceptance probabilities along the chain. No request's SLO is looked at. Costs come
    from the fitted model instead of tables of dummy steps, acceptance from the engine's online calibration
    instead of vLLM's logistic estimator.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._max_depth = config.max_depth

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """Chains of `max_depth` for all, always: only verification adapts."""
        return [DraftPlan(depth=min(self._max_depth, request.max_draft)) for request in batch]

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """The B* slots most likely to survive; of equals the first."""
        if not batch:
            return []
        forest, n = Forest.of(trees), len(batch)
        survival = context.calibration.path_probabilities(forest, [request.drafter for request in batch])
        slots = np.flatnonzero(forest.parent >= 0)
        slots = slots[np.argsort(-survival[slots], kind="stable")]
        num_context = sum(request.num_context for request in batch)
        verify_s = context.cost.verify_seconds(n, n, num_context, drafted=True)
        base_s = context.draft_s + context.draft_overhead_s + verify_s
        seconds = base_s + added_seconds(batch, len(slots), context)
        budget, _ = best_prefix(survival[slots], float(n), seconds)
        chosen = np.zeros(forest.num_nodes, dtype=np.bool_)
        chosen[forest.roots] = True
        chosen[slots[:budget]] = True
        return forest.chosen_nodes(chosen)
