"""Whether a figure's series do what is claimed of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.compare_statistics import Interval, mean_of
from simulator.reproduction.spec import SPEEDUP, Claim, Figure, Value

# By series and value of the axis, the figures of every seed, in the order of seeds.
Runs = Mapping[tuple[str, Value], list[dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a claim holds here, and the numbers that say so. None: it was not run where it can be told."""

    holds: bool | None
    here: str


class Results:
    """The runs of a figure, by metric."""

    def __init__(self, figure: Figure, runs: Runs) -> None:
        self.figure, self.runs = figure, runs
        self.values = [value for value in figure.points if any(key[1] == value for key in runs)]

    def of(self, metric: str, label: str, value: Value) -> list[float | None]:
        """The metric in every seed."""
        runs = self.runs.get((label, value), [])
        if metric == SPEEDUP:
            base = self.runs.get((self.figure.reference, value), [])
            pairs = zip(base, runs, strict=False)
            return [a["latency"] / b["latency"] for a, b in pairs if "latency" in a and "latency" in b]
        return [run.get(metric) for run in runs]

    def interval(self, metric: str, label: str, value: Value) -> Interval:
        """Mean over seeds, with its interval."""
        return mean_of(self.of(metric, label, value))

    def mean(self, metric: str, label: str, value: Value) -> float:
        """Mean over seeds.

        Raises:
            KeyError: if there is none.
        """
        found = self.interval(metric, label, value).mean
        if found is None:
            raise KeyError(f"{label} at {value}")
        return found


# Below so many per cent of violations nothing is divided: it would be a handful of requests.
LEAST = 1.0
_TOO_FEW = "under 1 % under either: too few to compare"
# Of how many values of the axis a check can tell anything.
_LEAST_POINTS = {"constant": 2, "declines": 2, "falls below": 2, "inner peak": 3, "single peak": 3}
Check = Callable[[Results, Claim, list[Value]], Verdict]


def verdict(results: Results, claim: Claim) -> Verdict:
    """Check one claim; values of the axis that were not run are left out."""
    at = [value for value in (claim.at or results.values) if value in results.values]
    if len(at) < _LEAST_POINTS.get(claim.kind, 1):
        return Verdict(None, "not run")
    try:
        return CHECKS[claim.kind](results, claim, at)
    except KeyError as error:
        return Verdict(None, f"not run: {error.args[0]}")


def _above(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """At every value, each of `series` is at least the best of `against`, less `limit`."""
    least, where = float("inf"), ""
    for value in at:
        best = max(claim.against, key=lambda label: results.mean(claim.metric, label, value))
        for label in claim.series:
            held = results.mean(claim.metric, label, value)
            margin = held - results.mean(claim.metric, best, value)
            if margin < least:
                least = margin
                where = f"{label} {_number(held)}, {best} {_number(held - margin)} at {value}"
    return Verdict(least >= -claim.limit, f"least margin {_signed(least)}: {where}")


def _within(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """At every value, each of `series` is at least the best of `against`, less the share `limit` of it."""
    least, where = float("inf"), ""
    for value in at:
        best = max(claim.against, key=lambda label: results.mean(claim.metric, label, value))
        most = results.mean(claim.metric, best, value)
        for label in claim.series:
            held = results.mean(claim.metric, label, value)
            share = held / most if most > 0.0 else float("inf")
            if share < least:
                least = share
                where = f": {label} {_number(held)}, {best} {_number(most)} at {value}"
    return Verdict(least >= 1.0 - claim.limit, f"least {least:.3f}x{where}")


def _ratio(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """The best of `against` by the first of `series`, of a metric where less is better, at its largest."""
    ratios = {value: found for value in at if (found := _divided(results, claim, value)) is not None}
    if not ratios:
        return Verdict(None, _TOO_FEW)
    value = max(ratios, key=lambda value: ratios[value][0])
    return Verdict(ratios[value][0] >= claim.limit, ratios[value][1])


def _every_ratio(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """As `ratio`, but at every value."""
    ratios = [found for value in at if (found := _divided(results, claim, value)) is not None]
    if not ratios:
        return Verdict(None, _TOO_FEW)
    return Verdict(all(ratio >= claim.limit for ratio, _ in ratios), ", ".join(text for _, text in ratios))


def _divided(results: Results, claim: Claim, value: Value) -> tuple[float, str] | None:
    """The least of `against` by the first of `series`; None where both are too small to compare."""
    other = min(results.mean(claim.metric, label, value) for label in claim.against)
    held = results.mean(claim.metric, claim.series[0], value)
    if max(held, other) < LEAST:
        return None
    ratio = other / held if held > 0.0 else float("inf")
    return ratio, f"{_times(ratio)} at {value} ({_number(other)} against {_number(held)})"


def _gain(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """The first of `series` by the best of `against`, of a metric where more is better, at its largest."""
    gains = {}
    for value in at:
        other = max(results.mean(claim.metric, label, value) for label in claim.against)
        held = results.mean(claim.metric, claim.series[0], value)
        gains[value] = held / other if other > 0.0 else (float("inf") if held > 0.0 else 1.0)
    value = max(gains, key=lambda value: gains[value])
    return Verdict(gains[value] >= claim.limit, f"{_times(gains[value])} at {value}")


def _falls_below(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """Each of `series` is above `limit` at the first value and below it at some later one."""
    parts, holds = [], True
    for label in claim.series:
        held = [results.mean(claim.metric, label, value) for value in at]
        below = next((i for i, one in enumerate(held) if i and one < claim.limit), None)
        holds = holds and held[0] > claim.limit and below is not None
        end = f"{_number(min(held))} at least" if below is None else f"{_number(held[below])} at {at[below]}"
        parts.append(f"{label}: {_number(held[0])} at {at[0]}, {end}")
    return Verdict(holds, "; ".join(parts))


def _never_below(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """Each of `series` is at least `limit` at every value."""
    held = {(a, b): results.mean(claim.metric, a, b) for a in claim.series for b in at}
    least = min(held, key=lambda key: held[key])
    return Verdict(held[least] >= claim.limit, f"least {_number(held[least])}: {least[0]} at {least[1]}")


def _declines(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """Each of `series` is lower at the last value than at the first, by more than `limit` of the first."""
    first, last = at[0], at[-1]
    parts, holds = [], first != last
    for label in claim.series:
        a, b = results.mean(claim.metric, label, first), results.mean(claim.metric, label, last)
        holds = holds and a - b > claim.limit * a
        parts.append(f"{label}: {_number(a)} at {first}, {_number(b)} at {last}")
    return Verdict(holds, "; ".join(parts))


def _constant(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """Each of `series` varies by no more than `limit` of its largest value."""
    parts, holds = [], True
    for label in claim.series:
        held = [results.mean(claim.metric, label, value) for value in at]
        holds = holds and max(held) - min(held) <= claim.limit * max(held)
        parts.append(f"{label}: {_number(min(held))} to {_number(max(held))}")
    return Verdict(holds, "; ".join(parts))


def _single_peak(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """Each of `series` rises to one value and falls from it; changes below `limit` of the peak are noise."""
    parts, holds = [], True
    for label in claim.series:
        held = [results.mean(claim.metric, label, value) for value in at]
        top = held.index(max(held))
        slack = claim.limit * held[top]
        rises = all(b >= a - slack for a, b in pairwise(held[: top + 1]))
        falls = all(b <= a + slack for a, b in pairwise(held[top:]))
        holds = holds and rises and falls
        parts.append(f"{label}: {at[top]}")
    return Verdict(holds, "highest at " + ", ".join(parts))


def _inner_peak(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """Each of `series` is highest between the first and the last value, `limit` times the first or more."""
    parts, holds = [], True
    for label in claim.series:
        held = [results.mean(claim.metric, label, value) for value in at]
        top = held.index(max(held))
        holds = holds and 0 < top < len(at) - 1 and held[top] >= claim.limit * held[0]
        parts.append(
            f"{label}: {_times(held[top] / held[0])} at {at[top]}, {_times(held[-1] / held[0])} at {at[-1]}"
        )
    return Verdict(holds, "; ".join(parts))


def _order(results: Results, claim: Claim, at: list[Value]) -> Verdict:
    """`series` ascend at every value, each at least the one before, less `limit`."""
    parts, holds = [], True
    for value in at:
        held = [results.mean(claim.metric, label, value) for label in claim.series]
        holds = holds and all(b >= a - claim.limit for a, b in pairwise(held))
        parts.append(f"{value}: " + ", ".join(_number(one) for one in held))
    return Verdict(holds, "; ".join(parts))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + _number(value)


def _times(value: float) -> str:
    return "none left" if value == float("inf") else f"{value:.2f}x"


CHECKS: Mapping[str, Check] = {
    "above": _above,
    "constant": _constant,
    "declines": _declines,
    "every ratio": _every_ratio,
    "falls below": _falls_below,
    "gain": _gain,
    "inner peak": _inner_peak,
    "never below": _never_below,
    "order": _order,
    "ratio": _ratio,
    "single peak": _single_peak,
    "within": _within,
}
