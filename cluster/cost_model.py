"""Forward time of target and drafters as a linear model (SmartSpec eq. 7, SpecServe eq. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from scipy.optimize import nnls

# Names under which verify forwards are corrected: plain decoding, and with drafts in between.
VERIFY_PLAIN, VERIFY_DRAFTED = "verify", "verify after drafting"


class StepPoint(msgspec.Struct, frozen=True):
    """One measured forward: requests in the batch, rows (tokens), context tokens in total, seconds."""

    num_requests: int
    num_tokens: int
    num_context: int
    seconds: float


class LinearCost(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds = alpha * context + gamma * tokens + rho * requests + delta`.

    `rho` is not in the papers: on a CPU, attention is run per request and costs accordingly.
    All in seconds; `context` and `tokens` are totals over the batch.
    """

    alpha: float = 0.0
    gamma: float = 0.0
    rho: float = 0.0
    delta: float = 0.0

    def seconds(self, num_requests: int, num_tokens: int, num_context: int) -> float:
        """Predicted time of one forward."""
        return self.alpha * num_context + self.gamma * num_tokens + self.rho * num_requests + self.delta

    @classmethod
    def fit(cls, points: Sequence[StepPoint]) -> LinearCost:
        """Least squares of relative errors with non-negative coefficients.

        Raises:
            ValueError: with fewer than four points.
        """
        if len(points) < 4:
            raise ValueError(f"{len(points)} points cannot fit four coefficients")
        features = np.array(
            [[p.num_context, p.num_tokens, p.num_requests, 1.0] for p in points], dtype=np.float64
        )
        seconds = np.array([p.seconds for p in points])
        # Dividing by the observation makes every point count by its relative error.
        (alpha, gamma, rho, delta), _ = nnls(features / seconds[:, None], np.ones(len(points)))
        return cls(alpha=float(alpha), gamma=float(gamma), rho=float(rho), delta=float(delta))

    def knee(self, num_requests: int, slack: float = 1.5) -> int:
        """Most tokens whose time stays within `slack` times plain decoding of `num_requests`.

        This is the budget B of AdaServe: past it the forward is no longer near its memory-bound floor.
        """
        if self.gamma <= 0.0:
            return 1 << 16
        floor = self.seconds(num_requests, num_requests, 0)
        return max(num_requests, int(num_requests + (slack - 1.0) * floor / self.gamma + 1e-9))


class CostProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted costs of one cell's models on one machine.

    Attributes:
        target: cost of a verify forward.
        drafters: cost of one draft forward (one layer of the beam), by drafter name.
        overhead_s: seconds of a whole step spent outside forwards (messages, selection).
    """

    target: LinearCost
    drafters: dict[str, LinearCost] = {}
    overhead_s: float = 0.0


DEFAULT_PROFILE = CostProfile(
    target=LinearCost(alpha=1e-6, gamma=5e-4, rho=3e-4, delta=8e-3), overhead_s=1e-3
)


@dataclass(slots=True)
class CostModel:
    """A profile with online correction: one multiplicative factor per model, tracked by moving average.

    Attributes:
        profile: the offline fit.
        smoothing: weight of the newest observation.
    """

    profile: CostProfile
    smoothing: float = 0.05
    _factor: dict[str, float] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    def verify_seconds(
        self, num_requests: int, num_tokens: int, num_context: int, *, drafted: bool = False
    ) -> float:
        """Predicted seconds of one verify forward.

        `drafted` says whether drafters ran since the last one. They share caches and memory bandwidth
        with the target, so the same forward takes longer after them; each kind is corrected by its own
        observations.
        """
        predicted = self.profile.target.seconds(num_requests, num_tokens, num_context)
        return predicted * self._factor.get(VERIFY_DRAFTED if drafted else VERIFY_PLAIN, 1.0)

    def verify_token_seconds(self) -> float:
        """Marginal seconds of one more token in a verify forward."""
        return self.profile.target.gamma * self._factor.get(VERIFY_DRAFTED, 1.0)

    def draft_seconds(self, drafter: str, num_requests: int, width: int, depth: int) -> float:
        """Predicted seconds of one draft call: `depth` forwards, the first on one row per request."""
        cost = self.profile.drafters.get(drafter)
        if cost is None or depth == 0:
            return 0.0
        first = cost.seconds(num_requests, 2 * num_requests, 0)
        later = cost.seconds(num_requests, width * num_requests, 0)
        return (first + (depth - 1) * later) * self._factor.get(drafter, 1.0)

    def knee(self, num_requests: int) -> int:
        """AdaServe's hardware budget for a batch of `num_requests`."""
        return self.profile.target.knee(num_requests)

    def observe(self, model: str, predicted: float, actual: float) -> None:
        """Fold one step into the correction factor; `predicted` is what this model itself said."""
        if predicted <= 0.0 or actual <= 0.0:
            return
        current = self._factor.get(model, 1.0)
        # A hiccup of the machine must not be believed at once: a step counts at most fourfold.
        ratio = min(max(actual / predicted, 0.25), 4.0)
        # The first steps count for more: a profile of forwards alone knows nothing of their company.
        seen = self._seen[model] = self._seen.get(model, 0) + 1
        self._factor[model] = current * ratio ** max(self.smoothing, 1.0 / (seen + 3))

    def correction(self, model: str) -> float:
        """Current factor on the offline prediction."""
        return self._factor.get(model, 1.0)
