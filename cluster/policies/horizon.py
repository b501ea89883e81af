"""Chance constraint on a TPOT objective: tokens a step must bring so that it is met with high probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from cluster.policies.base import DecodeRequest

# An objective is met on time at whichever token the answer ends; so many tokens ahead it must hold again.
HORIZON_TOKENS = 64
# So few requests are looked at one by one in less time than all at once.
FEW_REQUESTS = 48


def quantile(miss_probability: float) -> float:
    """Standard normal quantile of `1 - miss_probability`.

    Raises:
        ValueError: unless it is strictly between 0 and 1.
    """
    if not 0.0 < miss_probability < 1.0:
        raise ValueError(f"a probability between 0 and 1 is needed, not {miss_probability}")
    return NormalDist().inv_cdf(1.0 - miss_probability)


def time_ahead(request: DecodeRequest, tpot_s: float) -> tuple[int, float]:
    """The tokens an objective of `tpot_s` is looked ahead for, and the seconds left until they are late."""
    horizon = max(1, min(HORIZON_TOKENS, request.num_remaining))
    return horizon, tpot_s * (request.num_decoded + horizon) - request.decoding_s


def required_tokens(request: DecodeRequest, step_s: float, z: float) -> float:
    """Expected tokens per step with which the request is on time over its horizon with high probability.

    Between AdaServe's expectation for the very next step and SpecServe's worst case of one token per step
    (design, "Beyond the papers"). For the next `h` tokens there is time for `S = (tpot (o + h) - l) / step_s`
    steps. With `m` expected tokens a step, of variance `m (m - 1)` as for a geometric number, the normal
    approximation of their sum after S steps reaches `h` with the probability that `z` stands for if

        m S - z sqrt(S m (m - 1)) = h,

    which is solved for `m`. The nearer the horizon, the more of a margin there is.

    Args:
        request: `num_remaining` bounds the horizon.
        step_s: seconds of one step.
        z: from `quantile`.

    Returns:
        tokens per step; 0 without an objective or where one token a step is enough for sure; AdaServe's A(r)
        where there is no time left for a step.
    """
    if request.tpot_s is None:
        return 0.0
    horizon, left_s = time_ahead(request, request.tpot_s)
    steps = left_s / step_s
    if steps < 1.0:
        return request.required(step_s)
    if steps >= horizon:
        return 0.0  # every step brings one token at least
    # (m S - h)^2 = z^2 S m (m - 1): one root for each sign of z.
    a = steps * steps - z * z * steps
    b = z * z * steps - 2.0 * horizon * steps
    # Zero for z = 0, where rounding can take it below.
    discriminant = max(0.0, b * b - 4.0 * a * horizon * horizon)
    if z < 0.0:
        return 2.0 * horizon * horizon / (math.sqrt(discriminant) - b)
    if a <= 0.0:
        return float(horizon)  # so few steps that no mean makes it sure: as much as can be had
    return min(float(horizon), (-b + math.sqrt(discriminant)) / (2.0 * a))


def required_by(batch: Sequence[DecodeRequest], step_s: float, z: float) -> NDArray[np.float64]:
    """float64 [requests], `required_tokens` of each."""
    if len(batch) < FEW_REQUESTS:
        return np.array([required_tokens(request, step_s, z) for request in batch])
    paced = [(r.tpot_s, r.num_decoded, r.decoding_s, r.num_remaining) for r in batch if r.tpot_s is not None]
    if not paced:
        return np.zeros(len(batch))
    tpot_s, num_decoded, decoding_s, num_remaining = np.array(paced, dtype=np.float64).T
    horizon = np.maximum(np.minimum(num_remaining, HORIZON_TOKENS), 1.0)
    steps = (tpot_s * (num_decoded + horizon) - decoding_s) / step_s
    a = steps * steps - z * z * steps
    b = z * z * steps - 2.0 * horizon * steps
    discriminant = np.maximum(b * b - 4.0 * a * horizon * horizon, 0.0)
    # From the last case of `required_tokens` to the first: whoever is in two is in the earlier one.
    with np.errstate(divide="ignore", invalid="ignore"):
        if z < 0.0:
            found = 2.0 * horizon * horizon / (np.sqrt(discriminant) - b)
        else:
            found = np.minimum((np.sqrt(discriminant) - b) / (2.0 * a), horizon)
            found = np.where(a <= 0.0, horizon, found)
    found = np.where(steps >= horizon, 0.0, found)
    found = np.where(steps < 1.0, (decoding_s + step_s) / tpot_s - num_decoded, found)
    if len(paced) == len(batch):
        return found
    required = np.zeros(len(batch))
    required[[request.tpot_s is not None for request in batch]] = found
    return required
