"""A fixed draft length for everybody, as vLLM's `num_speculative_tokens` (the papers' vLLM-Spec(k))."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import PolicyConfig
from cluster.policies.base import DecodeRequest, Int32, StepContext, all_nodes
from drafters.messages import DraftPlan
from engine.tree import TokenTree


class Fixed:
    """Chains of `fixed_depth` tokens, all verified.

    Attributes:
        plans_ahead: nothing in its plans depends on an answer; vLLM, too, sends EAGLE's drafts ahead.
    """

    plans_ahead = True

    def __init__(self, config: PolicyConfig) -> None:
        self._depth = config.fixed_depth

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """The same depth for all, less only where a request has less output left."""
        return [DraftPlan(depth=min(self._depth, request.max_draft)) for request in batch]

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """Everything drafted is verified."""
        return all_nodes(trees)
