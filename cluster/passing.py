"""How many requests that come later are expected to begin before one that waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.arrival_rates import ArrivalRates
from cluster.batching.fair_queue import FairQueue
from cluster.promises import Promises
from cluster.requests import Request

# Those who were told to come back within so many seconds are load for newcomers.
DUE_S = 2.0
# So many standard deviations more than the mean are reckoned with: five of six waits are then no longer.
DEVIATIONS = 1.0


@dataclass(frozen=True, slots=True)
class Passing:
    """Poisson arrivals that pass a request for as long as it waits, and of other tenants up to a number.

    Attributes:
        rate: requests per second that pass without end, as of a higher priority.
        bounded: of each of some tenants the requests per second, and how many of them may pass.
        deviations: so many standard deviations more than their mean are reckoned with: whoever waits
            for arrivals and ends to balance waits much longer than their means say.
    """

    rate: float = 0.0
    bounded: tuple[tuple[float, int], ...] = ()
    deviations: float = 0.0

    @property
    def is_nobody(self) -> bool:
        """Whether nobody passes."""
        return self.rate == 0.0 and not self.bounded

    def number(self, seconds: float) -> float:
        """How many will have passed by then."""
        open_ended = self.rate * seconds
        total = open_ended
        for rate, most in self.bounded:
            mean = rate * seconds
            total += min(mean, most)
            open_ended += mean if mean < most else 0.0
        return total + self.deviations * math.sqrt(open_ended)


NOBODY_PASSES = Passing()


def expected(
    newcomer: Request,
    ahead: Sequence[Request],
    waiting: Sequence[Request],
    fair: FairQueue,
    rates: ArrivalRates,
    promises: Promises,
    now: float,
    *,
    is_promised: bool,
) -> Passing:
    """Who comes later than the newcomer and is expected to begin before it.

    Of its own tenant those with a higher priority, for as long as it waits. Of each other tenant as many as
    it has turns left before the newcomer's. Expected are those who came lately, and who was told to come.

    Args:
        newcomer: who comes.
        ahead: of those waiting, who is before it.
        waiting: all of them.
        fair: whose turn it is.
        rates: who came lately.
        promises: who was told to come.
        now: the present.
        is_promised: whether the newcomer was: else those pass it also at the same priority.
    """
    own, priority = newcomer.submit.tenant.label, newcomer.submit.priority

    whose, level = own if fair.is_enabled else None, priority - 1 if is_promised else priority

    def counts(label: str, other: int) -> bool:
        return whose in (None, label) and other <= level

    until = now + DUE_S
    passing = promises.num_due(counts, until) / DUE_S
    others: dict[str, float] = {}
    charges: dict[str, float] = {}
    for flow in rates.flows(now):
        if flow.label == own or not fair.is_enabled:
            passing += flow.rate if flow.priority < priority else 0.0
        else:
            others[flow.label] = others.get(flow.label, 0.0) + flow.rate
            charges[flow.label] = flow.charge
    turns = fair.turns_before(newcomer, ahead, waiting, charges) if charges else {}
    # Of all tenants at once: hundreds of keys may have been told thousands of times.
    due = promises.num_due_of_each(until) if turns else {}
    bounded = tuple(
        (others[label] + due.get(label, 0.0) / DUE_S, most) for label, most in turns.items() if most > 0
    )
    return Passing(passing, bounded, DEVIATIONS)
