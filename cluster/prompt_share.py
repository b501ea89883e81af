"""How far prompts fill the steps: of the room a step has for their tokens, the share they take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from cluster.batching.common import tokens_left
from cluster.batching.registry import reads_beside
from cluster.chunk_size import chunk_tokens
from cluster.config import SchedulerConfig
from cluster.linear_cost import LinearCost
from cluster.requests import PREFILL, Request
from cluster.running_mean import RunningMean

# Prompts admitted that fill so many steps fill the steps that matter.
MANY_STEPS = 8


@dataclass(slots=True)
class PromptShare:
    """Share of the steps' room for prompt tokens that is taken.

    A step with room left would have taken more of them: while there is room, a decode step saved is a step
    saved, however many steps have prompts in them.

    Attributes:
        chunk_tokens: prompt tokens a step has room for.
        reads_beside: whether steps read prompts beside decoding.
        ahead: expected of the next steps, 0 to 1.
        rows: prompt tokens that the next step has work for, and room, beside decoding.
        took_s: seconds that prompts added to the last step's forward, as predicted.
    """

    chunk_tokens: int
    reads_beside: bool = True
    ahead: float = 0.0
    took_s: float = 0.0
    rows: int = 0
    _lately: RunningMean = field(default_factory=lambda: RunningMean(0.0))

    @classmethod
    def of(cls, scheduler: SchedulerConfig, target: LinearCost) -> PromptShare:
        """Of a cell whose target has these costs."""
        return cls(chunk_tokens(scheduler, target), reads_beside=reads_beside(scheduler.batching))

    def look(self, running: Collection[Request]) -> None:
        """Before each step, at those admitted: a burst of prompts shows here before it shows in the steps."""
        num_tokens = sum([tokens_left(request) for request in running if request.state in PREFILL])
        num_steps = num_tokens / self.chunk_tokens
        self.rows = min(self.chunk_tokens, num_tokens) if self.reads_beside else 0
        self._lately.follow(min(1.0, num_steps))
        self.ahead = max(self._lately.value, min(1.0, num_steps / MANY_STEPS))
