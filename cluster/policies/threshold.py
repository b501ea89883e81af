"""Dynamic draft length by a confidence threshold, as in Hugging Face Transformers.

Its assisted generation stops a draft at `assistant_confidence_threshold` (0.4); SpecServe (2025, section
7.1) compares with it as the threshold-based dynamic method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.config import PolicyConfig
from cluster.policies.base import DecodeRequest, Int32, StepContext, all_nodes
from drafters.messages import DraftPlan
from engine.tree import TokenTree


class Threshold:
    """Chains are drafted up to and with the first token below the threshold, and verified as they are."""

    def __init__(self, config: PolicyConfig) -> None:
        self._stop_token_logp = log_probability(config.confidence_threshold)
        self._max_depth = config.max_depth

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """Chains of at most `max_depth` that the drafter ends at a token it is not sure of."""
        return [
            DraftPlan(depth=min(self._max_depth, request.max_draft), stop_token_logp=self._stop_token_logp)
            for request in batch
        ]

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """Everything drafted is verified, the token that fell below included."""
        return all_nodes(trees)


def log_probability(probability: float) -> float:
    """Its logarithm; minus infinity for 0."""
    return math.log(probability) if probability > 0.0 else -math.inf
