"""Tells workers that are busy from those that are dead or stuck: a pure judgement, times come from outside.

A worker's process sends a sign of life (a heartbeat) from a thread of its own, beside the thread that
answers calls. Three things follow from the two together:

- *busy*: heartbeats come, and the call it works on is within the time it may take;
- *silent*: no heartbeats. The process is stopped, swapped out, or its machine cannot be reached;
- *stuck*: heartbeats come, and the call has taken longer than it may. The thread that computes is in an
  endless loop, a deadlock, or a collective operation that another rank has left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cluster.health_config import HealthConfig

Reason = Literal["silent", "stuck"]

# What is seen must be seen in so many looks that follow each other: whoever looks can have been held up
# as well, and finds the signs that came meanwhile only after its first look.
LOOKS = 2


@dataclass(frozen=True, slots=True)
class Signs:
    """What is known of a process.

    Attributes:
        heard_s: seconds since anything was heard of it.
        answered_s: seconds since its last answer; since it was made if it has given none.
        call_s: seconds it has worked on the oldest call not answered; None if it owes no answer.
        predicted_s: what the cost model expects of that call.
        num_answered: answers so far.
    """

    heard_s: float
    answered_s: float
    call_s: float | None = None
    predicted_s: float = 0.0
    num_answered: int = 0


def call_limit_s(signs: Signs, floor_s: float, config: HealthConfig) -> float:
    """Seconds that the oldest call may take.

    Args:
        signs: of the process.
        floor_s: what any call of this worker may take.
        config: how much longer than predicted, and how long a first call.
    """
    limit_s = max(floor_s, config.stuck_factor * signs.predicted_s)
    return limit_s if signs.num_answered else max(limit_s, config.first_call_s)


def judge(signs: Signs, floor_s: float, config: HealthConfig) -> Reason | None:
    """What is wrong with a process, by what is known of it now; None if nothing."""
    if signs.heard_s >= config.silent_s:
        return "silent"
    if signs.call_s is not None and signs.call_s >= call_limit_s(signs, floor_s, config):
        return "stuck"
    return None


@dataclass(slots=True)
class Suspicions:
    """Who seemed stalled in the last looks, by name."""

    _looks: dict[str, int] = field(default_factory=dict)

    def confirm(self, name: str, reason: Reason | None) -> bool:
        """Whether the reason has been seen often enough to act on; asked once in each look."""
        if reason is None:
            self._looks.pop(name, None)
            return False
        self._looks[name] = self._looks.get(name, 0) + 1
        if self._looks[name] < LOOKS:
            return False
        del self._looks[name]
        return True

    def keep(self, names: set[str]) -> None:
        """Forget all others."""
        for name in self._looks.keys() - names:
            del self._looks[name]
