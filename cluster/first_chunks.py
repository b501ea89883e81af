"""How long prompts wait for their first chunk when the target should be free: mostly for drafts of others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.outstanding_verify import OutstandingVerify
from cluster.requests import Request
from cluster.running_mean import RunningMean
from verifier.messages import VerifyResult

# A wait counts as at most so many times what the call's forward should take: a hiccup is not believed.
MOST_TIMES = 4.0


@dataclass(slots=True)
class FirstChunks:
    """A mean over prompts that were begun beside others who decode.

    From when the call before should have been answered, by its forward alone: its messages and, where anybody
    drafts, the drafts of the step come in between. One mean for all loads: whoever is begun corrects it.
    """

    _wait: RunningMean = field(default_factory=lambda: RunningMean(0.0))
    _due_at: float | None = None

    def verified(self, result: VerifyResult, sent: OutstandingVerify, running: Iterable[Request]) -> None:
        """The target answered a call; requests as they were before the answer."""
        due_at, self._due_at = self._due_at, sent.sent_at + sent.predicted_s
        computed = {progress.request_id for progress in result.prefills}
        if due_at is None or not computed or not sent.trees:
            return
        for request in running:
            begun_at = request.first_chunk_at
            # Later chunks may have waited for prompts of others.
            if begun_at is not None and request.request_id in computed and not request.num_computed:
                wait_s = max(0.0, begun_at - max(due_at, request.arrived))
                self._wait.follow(min(wait_s, MOST_TIMES * sent.predicted_s))

    def wait_s(self, num_beside: int) -> float:
        """Seconds from when the target should be free until a newcomer's prompt is begun beside so many."""
        return self._wait.value if num_beside > 0 else 0.0
