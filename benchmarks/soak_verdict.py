"""What a soak run shows: whether memory grows, what is left when idle, whether latency stays. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from benchmarks.live_load import Ended

#: Latency of the end may differ from that of the beginning by this share.
LATENCY_WITHIN = 0.05

Trend = Literal["flat", "grows", "too short to say"]


@dataclass(frozen=True, slots=True)
class Slope:
    """A linear fit with its 95 % confidence interval, all in units of the values per unit of the times."""

    value: float
    low: float
    high: float
    num_samples: int

    def verdict(self, limit: float) -> Trend:
        """Whether growth above `limit` is excluded, shown, or neither."""
        if self.high <= limit:
            return "flat"
        return "grows" if self.low > limit else "too short to say"


def fit(times: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares, its interval widened for residuals that follow each other.

    Samples of a process's memory are not independent. Their effective number is `n (1 - r) / (1 + r)` with
    `r` the residuals' correlation from one sample to the next (Santer et al., J. Geophys. Res. 105, 2000).

    Raises:
        ValueError: for fewer than three samples.
    """
    count = len(times)
    if count < 3:
        raise ValueError(f"a slope with an interval needs three samples, not {count}")
    x, y = np.asarray(times, float), np.asarray(values, float)
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ (y - y.mean())) / spread
    residuals = y - y.mean() - slope * centred
    squared = float(residuals @ residuals)
    # Rounding leaves something of a perfect fit.
    if squared <= 1e-18 * max(1.0, float(y @ y)):
        return Slope(slope, slope, slope, count)
    lag = float(residuals[1:] @ residuals[:-1]) / squared
    lag = min(max(lag, 0.0), 0.99)
    effective = max(3.0, count * (1.0 - lag) / (1.0 + lag))
    error = math.sqrt(squared / (effective - 2.0) / spread)
    reach = float(stats.t.ppf(0.975, effective - 2.0)) * error
    return Slope(slope, slope - reach, slope + reach, count)


def latency_change(ended: Sequence[Ended], begin: float, end: float, window_s: float) -> dict[str, Any]:
    """Latency of the first and the last `window_s` of [begin, end], and how the medians compare.

    Requests count by when they were sent. `within` is None where there are too few to compare.
    """
    first = [one for one in ended if begin <= one.sent_s < begin + window_s]
    last = [one for one in ended if end - window_s <= one.sent_s < end]
    found: dict[str, Any] = {"window_s": window_s}
    changes: list[float] = []
    for name in ("ttft_ms", "tpot_ms"):
        before, after = (_quantiles([getattr(one, name) for one in part]) for part in (first, last))
        change = None
        if before["median"] and after["median"]:
            change = after["median"] / before["median"] - 1.0
            changes.append(change)
        found[name] = {"first": before, "last": after, "change": change}
    found["within"] = all(change <= LATENCY_WITHIN for change in changes) if len(changes) == 2 else None
    return found


def by_minute(ended: Sequence[Ended], begin: float) -> list[dict[str, Any]]:
    """Requests, latency and attainment by the minute in which they were sent."""
    minutes: dict[int, list[Ended]] = {}
    for one in ended:
        minutes.setdefault(int((one.sent_s - begin) // 60.0), []).append(one)
    return [
        {
            "minute": minute,
            "requests": len(of),
            "attained": sum(one.attained for one in of) / len(of),
            "ttft_ms": _quantiles([one.ttft_ms for one in of]),
            "tpot_ms": _quantiles([one.tpot_ms for one in of]),
        }
        for minute, of in sorted(minutes.items())
    ]


def _quantiles(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    if not known:
        return {"median": None, "p95": None}
    return {"median": float(np.median(known)), "p95": float(np.percentile(known, 95))}
