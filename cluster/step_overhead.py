"""What a step takes besides drafting and forwards, by the requests in it: two lines learnt from steps."""

from __future__ import annotations

from cluster.call_cost import CallCost

# Seconds of each request of a step, until steps of several sizes have said otherwise.
PER_REQUEST_S = 5e-5
# Weight of the newest step.
SMOOTHING = 0.05
# A line takes 0 seconds for no observation.
LEAST_S = 1e-9


class StepOverhead:
    """Seconds of messages, planning and selection in plain steps, and in those with drafts.

    Whether drafting pays is asked for the requests at hand, and the scheduler's work grows with them: a mean
    over steps of all sizes says too little of large ones, so that they draft where it does not pay, and too
    much of small ones.
    """

    def __init__(self, overhead_s: float) -> None:
        """Start from `overhead_s` seconds with drafts, which take more messages, and half without."""
        self._plain = CallCost(fixed_s=overhead_s / 2)
        self._drafted = CallCost(fixed_s=overhead_s)
        # Lines of the last two steps.
        self._before: tuple[CallCost | None, CallCost | None] = (None, None)

    def plain_s(self, num_requests: int) -> float:
        """Seconds beside the forward of a step that decodes so many requests without drafts."""
        return self._plain.expected_s(PER_REQUEST_S * num_requests)

    def drafted_s(self, num_requests: int) -> float:
        """Seconds beside drafting and the forward of a step in which so many requests take part."""
        return self._drafted.expected_s(PER_REQUEST_S * num_requests)

    def observe(self, num_requests: int, seconds: float, *, drafted: bool) -> None:
        """One step; one that decodes nothing says nothing, nor does one after two of the other kind.

        Such a step pays for the change: drafters read what they missed, or still compute ahead.
        """
        if not num_requests:
            return
        line, other = (self._drafted, self._plain) if drafted else (self._plain, self._drafted)
        other.missed()
        before, self._before = self._before, (self._before[1], line)
        if line in before:
            line.observe(PER_REQUEST_S * num_requests, max(seconds, LEAST_S), SMOOTHING)
