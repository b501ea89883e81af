"""Forward time as a linear function with a knee, and what experts add (SmartSpec eq. 7, SpecServe eq. 2)."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Count = TypeVar("Count", float, Float64)

# No budget of a forward is larger.
MOST_BUDGET = 1 << 16


class StepPoint(msgspec.Struct, frozen=True):
    """One measured forward.

    Attributes:
        num_requests: requests in the batch.
        num_tokens: rows of the batch; a fraction where forwards of different sizes were timed together.
        num_context: context tokens of all requests.
        seconds: its time.
    """

    num_requests: int
    num_tokens: float
    num_context: int
    seconds: float


class TargetForwards(msgspec.Struct, frozen=True, kw_only=True):
    """Measured verify forwards of one target.

    Attributes:
        points: one per shape.
        expert_share: of a layer's experts, how many each token is sent to; 0 for a model without any.
    """

    points: list[StepPoint]
    expert_share: float = 0.0


class LinearCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a forward, linear but for the knee of the roofline (SmartSpec eq. 7; AdaServe v1, section
    5.2) and for the experts of a mixture.

    `alpha * context + beta * attended + gamma * tokens + gamma_knee * max(0, tokens - knee_tokens)
    + rho * requests + experts_s * experts_read(tokens) + delta`, with `context` and `tokens` totals over the
    batch and `attended` the sum over rows of their context lengths.

    The papers have `alpha`, `gamma` and `delta`. On a CPU attention runs request by request (`rho`), and
    its arithmetic is not hidden behind reading the cache (`beta`). Where a GPU reads its weights in the
    time it computes some hundred tokens, `gamma` is near zero and `gamma_knee` is what tokens cost past
    the knee; `gamma_knee` 0 is a machine without a knee.

    In a mixture of experts a token needs the weights of a few, and tokens of one forward share those that
    more than one of them needs. So the first tokens beside another are the dearest, and after some dozens
    further ones cost no weights at all: the other way round than at the knee.

    Attributes:
        experts_s: seconds that all experts take beyond what rows cost; 0 for a model without.
        expert_share: of a layer's experts, how many each token is sent to.
    """

    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0
    rho: float = 0.0
    delta: float = 0.0
    gamma_knee: float = 0.0
    knee_tokens: float = 0.0
    experts_s: float = 0.0
    expert_share: float = 0.0

    def seconds(
        self, num_requests: int, num_tokens: float, num_context: int, num_attended: float | None = None
    ) -> float:
        """Predicted time of one forward.

        Args:
            num_requests: requests in the batch.
            num_tokens: rows of the batch.
            num_context: context tokens of all requests.
            num_attended: sum over rows of their context; as if every request had the mean if None.
        """
        seconds = self.alpha * num_context
        if self.beta:
            if num_attended is None:
                num_attended = num_tokens * num_context / num_requests if num_requests else 0.0
            seconds += self.beta * num_attended
        seconds += self.gamma * num_tokens
        seconds += self.rho * num_requests + self.delta
        if num_tokens > self.knee_tokens:
            seconds += self.gamma_knee * (num_tokens - self.knee_tokens)
        if self.experts_s:
            seconds += self.experts_s * experts_read(num_tokens, self.expert_share)
        return seconds

    def token_seconds(self, context: float = 0.0, num_tokens: float = math.inf) -> float:
        """Seconds of one more token past the knee, in a request of `context` tokens.

        Beside `num_tokens` others; beside any number all experts are read.
        """
        unread = (1.0 - self.expert_share) ** num_tokens
        return float(
            self.gamma + self.gamma_knee + self.beta * context + self.experts_s * self.expert_share * unread
        )

    def added_seconds(self, num_tokens: float, most: int, context: float = 0.0) -> Float64:
        """float64 [most], seconds that each of `most` further tokens adds to a forward of `num_tokens`.

        They rise at the knee, and fall where there are experts.

        Args:
            num_tokens: rows it has.
            most: rows considered on top.
            context: context tokens of the requests they belong to, on average.
        """
        each = self.gamma + self.beta * context
        if num_tokens >= self.knee_tokens:
            each += self.gamma_knee
        added = np.full(most, each)
        if self.gamma_knee != 0.0 and num_tokens < self.knee_tokens < num_tokens + most:
            beyond = np.maximum(num_tokens + np.arange(most + 1, dtype=np.float64) - self.knee_tokens, 0.0)
            added += self.gamma_knee * (beyond[1:] - beyond[:-1])
        if self.experts_s and most:
            unread = (1.0 - self.expert_share) ** (num_tokens + np.arange(most, dtype=np.float64))
            added += self.experts_s * self.expert_share * unread
        return added

    def knee(self, num_requests: int, slack: float = 1.5) -> int:
        """Most tokens whose time stays within `slack` times plain decoding of `num_requests`.

        This is the budget B of AdaServe: past it the forward is no longer near its memory-bound floor. Of a
        mixture the floor is with all experts read, as it is for any number of tokens worth a budget; by what
        few experts take, a lone request's budget would be a token.
        """
        plain_s = self.seconds(num_requests, num_requests, 0) + self.unread_s(num_requests)
        left = (slack - 1.0) * plain_s
        before = max(0.0, self.knee_tokens - num_requests)
        if self.gamma > 0.0 and left <= self.gamma * before:
            return max(num_requests, int(num_requests + left / self.gamma + 1e-9))
        slope = self.gamma + self.gamma_knee
        if slope <= 0.0:
            return MOST_BUDGET
        more = before + (left - self.gamma * before) / slope
        return max(num_requests, min(MOST_BUDGET, int(num_requests + more + 1e-9)))

    def scaled(self, factor: float) -> LinearCost:
        """The same forward, so many times as long."""
        return LinearCost(
            alpha=self.alpha * factor,
            beta=self.beta * factor,
            gamma=self.gamma * factor,
            rho=self.rho * factor,
            delta=self.delta * factor,
            gamma_knee=self.gamma_knee * factor,
            knee_tokens=self.knee_tokens,
            experts_s=self.experts_s * factor,
            expert_share=self.expert_share,
        )

    def unread_s(self, num_tokens: float) -> float:
        """Seconds of the experts that no token of a forward of so many is sent to."""
        return self.experts_s * (1.0 - experts_read(num_tokens, self.expert_share))


def experts_read(num_tokens: Count, expert_share: float) -> Count:
    """Share of a layer's experts that some token of a forward is sent to: `1 - (1 - share)^tokens`.

    As if tokens were sent independently, each to any experts alike. Real ones prefer some, and what tokens
    then share earlier shows in what is fitted.
    """
    unread: Count = (1.0 - expert_share) ** num_tokens
    return 1.0 - unread
