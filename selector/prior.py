"""Acceptance rate of a drafter on a new prompt: online Bayesian linear regression that forgets.

The model of LinUCB (Li et al., 2010) and of Bayesian ridge regression, `rate = w . x + noise`, with weights
that drift: `w_t - w_0 = sqrt(1 - 1/memory) (w_{t-1} - w_0) + drift`, stationary under the prior
N(w_0, diag(v_0)). The exact posterior is a Kalman filter. What is not observed again returns to the prior, so
no variance grows beyond it, as it does where old observations are merely discounted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


class DriftingRidge:
    """The regression of one drafter. A prediction costs O(d^2), an observation O(d^2)."""

    def __init__(self, mean: Float64, variance: Float64, memory: float) -> None:
        """A regression that knows nothing yet.

        Args:
            mean: float64 [d], w_0.
            variance: float64 [d], v_0, the prior variances of the weights, which are independent.
            memory: time, in the units of `now`, in which the weight of an observation falls to 1/e;
                infinite for ridge regression proper.

        Raises:
            ValueError: unless memory > 1.
        """
        if not memory > 1.0:
            raise ValueError(f"memory must be above 1, not {memory}")
        self._prior_mean, self._prior_variance = mean, variance
        self._kept = 1.0 - 1.0 / memory
        self._mean = mean.copy()
        self._covariance = np.diag(variance)
        self._at = 0

    def predict(self, features: Float64, now: int) -> tuple[float, float]:
        """Mean and variance of `w . x` at time `now`; the noise of an observation is not in it."""
        mean = float(self._prior_mean @ features)
        variance = float(features @ self._covariance @ features)
        learnt = float((self._mean - self._prior_mean) @ features)
        kept = self._kept ** (now - self._at)
        prior = float(features * features @ self._prior_variance)
        return mean + kept**0.5 * learnt, kept * variance + (1.0 - kept) * prior

    def observe(self, features: Float64, value: float, precision: float, now: int) -> None:
        """Fold in an observation of `w . x` with noise of variance `1 / precision`; time never goes back."""
        kept = self._kept ** (now - self._at)
        if kept < 1.0:
            self._mean = self._prior_mean + kept**0.5 * (self._mean - self._prior_mean)
            self._covariance *= kept
            self._covariance.flat[:: len(features) + 1] += (1.0 - kept) * self._prior_variance
        self._at = now
        gain = self._covariance @ features
        spread = float(features @ gain) + 1.0 / precision
        self._mean = self._mean + gain * ((value - float(self._mean @ features)) / spread)
        self._covariance -= gain[:, None] * (gain / spread)
