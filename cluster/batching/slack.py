"""How much time a request leaves a step: its TPOT objective as a deadline for its next tokens."""

from __future__ import annotations

import msgspec

from cluster.batching.base import BatchContext
from cluster.batching.common import tpot_s
from cluster.requests import Request

# A step is reckoned to take this much longer than predicted.
MARGIN = 1.1
# Steps of an average request that a request's own acceptance is averaged with.
PRIOR_STEPS = 4
# A request that is behind counts on at most so many further tokens to catch up: it may stop any time.
HORIZON_TOKENS = 32

INFINITE = float("inf")


def expected_tokens(request: Request, num_committed: float) -> float:
    """Tokens the request gets from a verify call: its own mean, shrunk towards that of all.

    Args:
        request: a running or waiting request.
        num_committed: mean tokens any request gets.
    """
    if request.submit.speculation.mode == "off":
        return 1.0
    more = num_committed - 1.0 if num_committed > 1.0 else 0.0
    return 1.0 + (request.num_accepted + PRIOR_STEPS * more) / (request.num_steps + PRIOR_STEPS)


def ahead_s(request: Request, now: float) -> float:
    """Seconds a request with a TPOT objective is ahead of it, o * t_tpot - l; negative behind it."""
    return _ahead_s(request, tpot_s(request), now)


def _ahead_s(request: Request, objective_s: float, now: float) -> float:
    if request.first_token_at is None:
        return 0.0
    num_decoded = len(request.output) - 1 - request.num_resubmitted
    return (num_decoded if num_decoded > 0 else 0) * objective_s - (now - request.first_token_at)


# A struct, not a dataclass: one is made per request and step.
class Pressure(msgspec.Struct, frozen=True, gc=False):
    """What a request's TPOT objective asks of the step it decodes in; times from now.

    Attributes:
        pace_s: seconds an average step of this request may take, t_tpot times the tokens it yields.
        ahead_s: seconds it is ahead.
        num_left: steps it can still count on.
    """

    pace_s: float
    ahead_s: float
    num_left: float

    @classmethod
    def of(cls, request: Request, context: BatchContext) -> Pressure:
        """The pressure of a request, none of it (infinite pace) without an objective."""
        tpot_ms = request.pace.tpot_ms
        if tpot_ms is None:
            return NO_PRESSURE
        objective_s = tpot_ms / 1e3
        tokens = expected_tokens(request, context.num_committed)
        num_left = request.num_remaining if request.num_remaining < HORIZON_TOKENS else HORIZON_TOKENS
        return cls(
            tokens * objective_s,
            _ahead_s(request, objective_s, context.now),
            (num_left if num_left > 1 else 1) / tokens,
        )

    @property
    def allowance_s(self) -> float:
        """A step that ends within this leaves the request within its objective: AdaServe's A(r) is met."""
        return self.pace_s + self.ahead_s

    def limit_s(self, least_s: float) -> float:
        """Longest step this request asks for, when the shortest possible takes `least_s`.

        That is its allowance. A request so far behind that no step meets it, but which can catch up over
        its horizon, asks for half the time that the shortest step would let it regain. One that cannot
        catch up asks for nothing: its limit is infinite.
        """
        allowance_s = self.pace_s + self.ahead_s
        if least_s <= allowance_s:
            return allowance_s
        regained_s = self.pace_s - least_s
        if regained_s > 0.0 and self.ahead_s + regained_s * self.num_left >= 0.0:
            return least_s + regained_s / 2
        return INFINITE


NO_PRESSURE = Pressure(INFINITE, 0.0, 0.0)
