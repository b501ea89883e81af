"""No speculation: one token per request and step."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import PolicyConfig
from cluster.policies.base import DecodeRequest, Int32, StepContext, all_nodes
from drafters.messages import DraftPlan
from engine.tree import TokenTree


class Autoregressive:
    """Plain continuous batching, the baseline every policy is measured against."""

    def __init__(self, config: PolicyConfig) -> None:
        del config

    def rests(self, num_requests: int, step: int) -> bool:
        """Always: nobody need be asked."""
        return True

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """Nobody drafts."""
        return [DraftPlan(depth=0) for _ in batch]

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """The roots are all there is."""
        return all_nodes(trees)
