"""How decoding goes at a load: what latencies of a newcomer are predicted from."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.running_mean import RunningMean


@dataclass(slots=True)
class LoadPace:
    """How steps went while about so many requests decoded.

    Attributes:
        num_decoding: requests decoding.
        step_s: seconds from one answer of the target to the next.
        num_committed: tokens a decoding request got per answer.
        num_context: tokens of a decoding request's sequence.
    """

    num_decoding: RunningMean
    step_s: RunningMean
    num_committed: RunningMean
    num_context: RunningMean
