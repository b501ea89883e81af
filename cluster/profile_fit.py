"""Fits the cost model to measured forwards, and says how well it predicts those it has not seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar, nnls

from cluster.linear_cost import LinearCost, StepPoint, experts_read
from cluster.profile_file import Fit, FitQuality

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

# Columns of the regression: alpha, beta, gamma, rho, delta; and experts, where there are any.
NUM_COEFFICIENTS = 5
# A knee costs two parameters: it must lower the root mean square of relative errors by this share.
KNEE_GAIN = 0.1
# Errors below this are rounding, not misfit: nothing is left for a knee to explain.
ROUNDING = 1e-9
# Share of the points that the fit does not see.
HELD_OUT = 0.25


def fit_cost(points: Sequence[StepPoint], expert_share: float = 0.0) -> LinearCost:
    """Least squares of relative errors with non-negative coefficients, with a knee where one pays.

    Args:
        points: forwards measured.
        expert_share: of a layer's experts, how many each token is sent to; 0 for a model without any.

    Raises:
        ValueError: with fewer points than coefficients, or a time that is not positive.
    """
    num_coefficients = NUM_COEFFICIENTS + (expert_share > 0.0)
    if len(points) < num_coefficients:
        raise ValueError(_too_few(points, f"for {num_coefficients} coefficients"))
    seconds = np.array([point.seconds for point in points])
    if not (seconds > 0.0).all():
        raise ValueError("a forward of no time at all was measured")
    tokens = np.array([point.num_tokens for point in points], dtype=np.float64)
    requests = np.array([point.num_requests for point in points], dtype=np.float64)
    context = np.array([point.num_context for point in points], dtype=np.float64)
    columns = np.stack([context, tokens * context / requests, tokens, requests, np.ones(len(points))], axis=1)
    if expert_share > 0.0:
        columns = np.column_stack([columns, experts_read(tokens, expert_share)])
    coefficients, error = _solve(columns, seconds)
    gamma_knee = knee = 0.0
    best_knee, knee_error = _best_knee(columns, tokens, seconds)
    if error > ROUNDING and knee_error <= (1.0 - KNEE_GAIN) * error:
        bent, _ = _solve(_with_knee(columns, tokens, best_knee), seconds)
        coefficients, gamma_knee, knee = bent[:-1], float(bent[-1]), best_knee
    alpha, beta, gamma, rho, delta, *experts = coefficients.tolist()
    return LinearCost(
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        rho=rho,
        delta=delta,
        gamma_knee=gamma_knee,
        knee_tokens=knee,
        experts_s=experts[0] if experts else 0.0,
        expert_share=expert_share,
    )


def fit_cost_of(whose: str, points: Sequence[StepPoint], expert_share: float = 0.0) -> LinearCost:
    """As `fit_cost`, whose errors then begin with whose forwards these are."""
    try:
        return fit_cost(points, expert_share)
    except ValueError as error:
        # From nothing: people are told what an error was raised for, which would say nothing of whose it was.
        raise ValueError(f"{whose}: {error}") from None


def fit_held_out(points: Sequence[StepPoint], seed: int = 0, *, expert_share: float = 0.0) -> Fit:
    """Fit to three quarters of the points, chosen at random, and predict the others.

    The smallest and the largest forward are always fitted: the errors are those of interpolation.

    Args:
        points: forwards measured.
        seed: of the choice.
        expert_share: as of `fit_cost`.

    Raises:
        ValueError: as `fit_cost`, or when too few points are left to be held out.
    """
    held_out = np.zeros(len(points), dtype=np.bool_)
    by_size = sorted(range(len(points)), key=lambda i: (points[i].num_tokens, points[i].num_context))
    inner = np.random.default_rng(seed).permutation(by_size[1:-1])
    held_out[inner[: int(HELD_OUT * len(points))]] = True
    if not held_out.any():
        raise ValueError(_too_few(points, "to hold some out"))
    fitted = [point for point, out in zip(points, held_out, strict=True) if not out]
    cost = fit_cost(fitted, expert_share)
    return Fit(cost=cost, quality=quality_of(cost, points, held_out), held_out=held_out.tolist())


def quality_of(cost: LinearCost, points: Sequence[StepPoint], held_out: Bool) -> FitQuality:
    """Errors of `cost` on those of the points that are held out (bool [points])."""
    errors = np.array(
        [
            abs(cost.seconds(point.num_requests, point.num_tokens, point.num_context) / point.seconds - 1.0)
            for point, out in zip(points, held_out, strict=True)
            if out
        ]
    )
    return FitQuality(
        num_fitted=int((~held_out).sum()),
        num_held_out=int(held_out.sum()),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        worst=float(errors.max()),
    )


def _too_few(points: Sequence[StepPoint], what_for: str) -> str:
    """For people: why so few forwards could be measured is that the model holds no more."""
    return (
        f"only {len(points)} shapes of forwards fit the model, too few {what_for} of its costs; more fit a "
        "larger KV pool (`num_slots`) or longer sequences (`max_model_len`)"
    )


def _solve(columns: Float64, seconds: Float64) -> tuple[Float64, float]:
    """Coefficients, and the root mean square of their relative errors."""
    # Dividing by the observation makes every point count by its relative error. Columns are brought to one
    # size first: contexts in the thousands beside ones would cost precision.
    relative = columns / seconds[:, None]
    size = np.linalg.norm(relative, axis=0)
    size[size == 0.0] = 1.0
    solution, residual = nnls(relative / size, np.ones(len(seconds)))
    return solution / size, float(residual) / float(np.sqrt(len(seconds)))


def _with_knee(columns: Float64, tokens: Float64, knee: float) -> Float64:
    return np.column_stack([columns, np.maximum(tokens - knee, 0.0)])


def _best_knee(columns: Float64, tokens: Float64, seconds: Float64) -> tuple[float, float]:
    """The knee with the least error and that error; searched between the measured token counts."""
    counts = np.unique(tokens)

    def error(knee: float) -> float:
        return _solve(_with_knee(columns, tokens, knee), seconds)[1]

    # At least two counts on either side, else the knee explains a single count, not a slope.
    candidates = counts[1:-2]
    if len(candidates) == 0:
        return 0.0, float("inf")
    errors = [error(float(knee)) for knee in candidates]
    best = int(np.argmin(errors))
    low, high = float(counts[best]), float(counts[best + 2])
    found = minimize_scalar(error, bounds=(low, high), method="bounded", options={"xatol": 1e-3 * high})
    if float(found.fun) < errors[best]:
        return float(found.x), float(found.fun)
    return float(candidates[best]), errors[best]
