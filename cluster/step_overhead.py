"""What a step takes besides drafting and forwards, by the requests in it: two lines learnt from steps."""

from __future__ import annotations

from cluster.call_cost import CallCost

# Seconds of each request of a step, until steps of several sizes have said otherwise.
PER_REQUEST_S = 5e-5
# Weight of the newest step.
SMOOTHING = 0.05
# A line takes 0 seconds for no observation.
LEAST_S = 1e-9
# Of plain steps that are sent ahead, until some were: what the target takes beside its forward is left.
AHEAD_FIXED, AHEAD_SLOPE = 0.125, 0.5
# Where at least this share of plain steps is sent ahead, the others are mostly the first after drafts.
LEAST_SHARE_AHEAD = 0.1


class StepOverhead:
    """Seconds of messages, planning and selection in plain steps, and in those with drafts.

    Whether drafting pays is asked for the requests at hand, and the scheduler's work grows with them: a mean
    over steps of all sizes says too little of large ones, so that they draft where it does not pay, and too
    much of small ones. Plain steps are steps of two kinds: those that are sent ahead do not wait for the
    scheduler, others do, as those in which the policy looks. What plain decoding would be is their mean, as
    they come once drafters rest.
    """

    def __init__(self, overhead_s: float, *, sends_ahead: bool = False) -> None:
        """Start from `overhead_s` seconds with drafts, which take more messages, and half without.

        If plain steps may be sent ahead (`sends_ahead`), from an eighth of it for those.
        """
        self._plain = CallCost(fixed_s=overhead_s / 2)
        self._ahead = CallCost(slope=AHEAD_SLOPE, fixed_s=overhead_s * AHEAD_FIXED)
        # Share of plain steps that are sent ahead.
        self._share_ahead = 1.0 if sends_ahead else 0.0
        self._drafted = CallCost(fixed_s=overhead_s)
        # Lines of the last two steps.
        self._before: tuple[CallCost | None, CallCost | None] = (None, None)

    def plain_s(self, num_requests: int) -> float:
        """Seconds beside the forward of a step that decodes so many requests without drafts.

        No more than with drafts: those take all of its messages, and others. What is expected of plain steps
        before any were seen would otherwise keep large ones from ever being seen.
        """
        requests_s, share = PER_REQUEST_S * num_requests, self._share_ahead
        plain_s = share * self._ahead.expected_s(requests_s)
        plain_s += (1.0 - share) * self._plain.expected_s(requests_s)
        return min(plain_s, self.drafted_s(num_requests))

    def drafted_s(self, num_requests: int) -> float:
        """Seconds beside drafting and the forward of a step in which so many requests take part."""
        return self._drafted.expected_s(PER_REQUEST_S * num_requests)

    def observe(
        self,
        num_requests: int,
        seconds: float,
        *,
        drafted: bool,
        was_ahead: bool = False,
        settled: bool = True,
    ) -> None:
        """One step; one that decodes nothing says nothing, nor does one after two of the other kind.

        Such a step pays for the change: drafters read what they missed, or still compute ahead. A plain one
        counts where those that follow are sent ahead, for the policy looks in such steps.

        Args:
            num_requests: that decoded.
            seconds: beside drafting and the forward.
            drafted: whether any was drafted for.
            was_ahead: whether it was sent before the step before was answered.
            settled: whether plain steps are what they are without drafters (`CostModel.has_settled`). For
                as long as they are not, they say nothing.
        """
        if not num_requests:
            return
        if not (drafted or settled):
            self._before = (self._before[1], self._plain)
            return
        if not drafted:
            self._share_ahead += SMOOTHING * (was_ahead - self._share_ahead)
        if was_ahead and not drafted:
            self._ahead.observe(PER_REQUEST_S * num_requests, max(seconds, LEAST_S), SMOOTHING)
            self._drafted.missed()
            self._before = (self._before[1], self._plain)
            return
        if drafted:
            self._ahead.missed()
        line, other = (self._drafted, self._plain) if drafted else (self._plain, self._drafted)
        other.missed()
        before, self._before = self._before, (self._before[1], line)
        begins_run = line is self._plain and self._share_ahead > LEAST_SHARE_AHEAD
        if line in before or begins_run:
            line.observe(PER_REQUEST_S * num_requests, max(seconds, LEAST_S), SMOOTHING)
