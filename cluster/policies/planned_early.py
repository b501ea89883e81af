"""Policies that plan every step say a step early where they would draft nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cluster.policies.base import DecodeRequest, StepContext
from drafters.messages import DraftPlan


class PlannedEarly(ABC):
    """A policy whose `plan` remembers nothing, so that it may be asked once more.

    It is asked about a step while the target still works on the one before, and by what is known then:
    where nothing would be drafted, the step is plain, and is sent ahead like those of any other policy.
    """

    tries_drafts = False
    _plain_step = -1
    _num_requests = 0

    def rests(self, num_requests: int, step: int) -> bool:
        """Whether this is the step last found to be plain, for no more requests than these."""
        return step == self._plain_step and num_requests >= self._num_requests

    def look_ahead(self, batch: Sequence[DecodeRequest], context: StepContext) -> None:
        """Rest in the step of `context` if `plan` drafts nothing for these."""
        if not any(plan.depth for plan in self.plan(batch, context)):
            self._plain_step, self._num_requests = context.step, len(batch)

    @abstractmethod
    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """See `Policy`."""
