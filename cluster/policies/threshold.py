"""Dynamic draft length by a confidence threshold, as in Hugging Face Transformers.

Its assisted generation stops a draft at `assistant_confidence_threshold` (0.4); SpecServe (2025, section
7.1) compares with it as the threshold-based dynamic method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.policies.base import DecodeRequest, Int32, StepContext
from drafters.messages import DraftPlan
from engine.tree import TokenTree


class Threshold:
    """Chains are verified as far as the drafter's probability of each token is at least the threshold.

    `DraftPlan.stop_logp` bounds a path's probability and not a token's, so the rule itself is applied at
    selection, after drafting; what Transformers saves by not drafting further is saved here only as far
    as `stop_logp` can tell. Transformers also verifies the token that fell below; here it is left out.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._threshold = config.confidence_threshold
        self._max_depth = config.max_depth

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """Chains of `max_depth`, ended early once some token is sure to have been below the threshold."""
        plans = []
        for request in batch:
            depth = min(self._max_depth, request.max_draft)
            plans.append(DraftPlan(depth=depth, stop_logp=stop_logp(self._threshold, depth)))
        return plans

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """Nodes with no token below the threshold on their path."""
        if not batch:
            return []
        forest = Forest.of(trees)
        confident = (forest.conditional >= self._threshold).astype(float)
        return forest.chosen_nodes(forest.path_product(confident) > 0.0)


def stop_logp(threshold: float, depth: int) -> float:
    """A path log-probability below which one of at most `depth` tokens must be below `threshold`."""
    return depth * math.log(threshold) if threshold > 0.0 and depth > 0 else -math.inf
