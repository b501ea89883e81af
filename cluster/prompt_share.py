"""How many of the next steps will compute prompts, from the steps before and from who is admitted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from cluster.requests import PREFILL, Request
from cluster.running_mean import RunningMean
from verifier.messages import VerifyResult

# So many prompts that are not computed yet fill the steps that matter with prompts.
MANY_PROMPTS = 8


@dataclass(slots=True)
class PromptShare:
    """Share of steps that have prompts in them.

    Attributes:
        ahead: expected of the next steps.
    """

    ahead: float = 0.0
    _lately: RunningMean = field(default_factory=lambda: RunningMean(0.0))

    def observe(self, result: VerifyResult) -> None:
        """One step; those that decode nothing do not count."""
        if result.verdicts:
            self._lately.follow(float(bool(result.prefills)))

    def look(self, running: Collection[Request]) -> None:
        """Those admitted: a burst of prompts shows here before it shows in the steps."""
        num_prompts = sum([request.state in PREFILL for request in running])
        self.ahead = max(self._lately.value, min(1.0, num_prompts / MANY_PROMPTS))
