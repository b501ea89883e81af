"""How a service recovers from a kill, from when tokens arrived and requests ended. Pure; times in seconds."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.live_load import Ended

#: Throughput counts as back at this share of what it was, over so many seconds.
BACK_AT = 0.9
WINDOW_S = 3.0
#: "During": requests that were open at some time within so long after a kill.
DURING_S = 10.0
_STEP_S = 0.1


@dataclass(slots=True)
class Kill:
    """A process that was ended, or stopped; what follows it is in seconds from then.

    Attributes:
        at_s: when, on the run's clock. role, pid, name: which. until_s: the next kill, or the end.
        replaced_s: until another had its place and served.
        noticed_s: of one that was stopped: until the system itself had ended it.
        resumed: it was stopped, not noticed in time, and allowed to go on.
        first_token_s: until a token came through what had taken its place.
        pause_s: the longest time without any token, over all requests.
        throughput_s: until throughput was back.
    """

    at_s: float
    role: str
    pid: int
    name: str
    until_s: float = math.inf
    replaced_s: float | None = None
    noticed_s: float | None = None
    resumed: bool = False
    first_token_s: float | None = None
    pause_s: float | None = None
    throughput_s: float | None = None


def longest_gap(times: Sequence[float], begin: float, end: float) -> tuple[float, float] | None:
    """The longest time without an arrival that overlaps [begin, end]; None if nothing arrives after begin.

    Args:
        times: of arrivals, ascending. What comes before the first counts as no gap.
        begin, end: the time looked at.
    """
    first = max(1, bisect.bisect_left(times, begin))
    longest: tuple[float, float] | None = None
    for at in range(first, len(times)):
        if times[at - 1] > end:
            break
        if longest is None or times[at] - times[at - 1] > longest[1] - longest[0]:
            longest = times[at - 1], times[at]
    return longest


class Throughput:
    """Tokens over time.

    Args:
        arrivals: times, ascending, and tokens.
    """

    def __init__(self, arrivals: Iterable[tuple[float, int]]) -> None:
        pairs = list(arrivals)
        self.times = [at for at, _ in pairs]
        self._sums = np.concatenate([[0], np.cumsum([tokens for _, tokens in pairs], dtype=np.int64)])

    def tokens(self, begin: float, end: float) -> int:
        """Tokens in [begin, end)."""
        first, last = bisect.bisect_left(self.times, begin), bisect.bisect_left(self.times, end)
        return int(self._sums[last] - self._sums[first])

    def rate(self, begin: float, end: float) -> float:
        """Tokens per second in [begin, end)."""
        return self.tokens(begin, end) / (end - begin)

    def back_after(self, begin: float, end: float, usual: float) -> float | None:
        """The first time from `begin` on whose next `WINDOW_S` have `BACK_AT` of the usual rate; None if none
        before `end` has."""
        at = begin
        while at + WINDOW_S <= end:
            # Multiples of the step add up to something less than a window that they should equal.
            if self.tokens(at, at + WINDOW_S) >= BACK_AT * usual * WINDOW_S - 1e-9:
                return at
            at += _STEP_S
        return None


def assess(
    kills: Sequence[Kill],
    throughput: Throughput,
    ended: Sequence[Ended],
    *,
    usual_rate: float,
    usual_gap_s: float,
    one_cell: bool,
) -> None:
    """Fill in what is known only afterwards.

    Args:
        kills: get it.
        throughput: of all tokens.
        ended: all requests.
        usual_rate: tokens per second of the undisturbed system under the same load.
        usual_gap_s: its longest time without a token.
        one_cell: whether all tokens pass through one target and one scheduler: then the first token after the
            pause came through the new one.
    """
    for kill in kills:
        gap = longest_gap(throughput.times, kill.at_s, min(kill.until_s, kill.at_s + DURING_S))
        begin = kill.at_s
        if gap is not None:
            kill.pause_s = gap[1] - gap[0]
            if kill.pause_s > usual_gap_s:
                begin = max(begin, gap[1])
            if one_cell and kill.role in ("verifier", "scheduler"):
                kill.first_token_s = gap[1] - kill.at_s
        if kill.role == "front_end":
            firsts = [
                first
                for one in ended
                for sent, first, _, _ in one.attempts
                if first is not None and sent >= kill.at_s
            ]
            kill.first_token_s = min(firsts) - kill.at_s if firsts else None
        back = throughput.back_after(begin, kill.until_s, usual_rate)
        kill.throughput_s = None if back is None else back - kill.at_s


def by_role(kills: Sequence[Kill]) -> dict[str, dict[str, Any]]:
    """Median and 95th percentile of every time, by what was killed; `missing` counts those not seen."""
    found: dict[str, dict[str, Any]] = {}
    for role in dict.fromkeys(kill.role for kill in kills):
        of = [kill for kill in kills if kill.role == role]
        figures: dict[str, Any] = {"kills": len(of), "resumed": sum(kill.resumed for kill in of)}
        for name in ("noticed_s", "replaced_s", "first_token_s", "pause_s", "throughput_s"):
            values = [value for kill in of if (value := getattr(kill, name)) is not None]
            figures[name] = {
                "median": float(np.median(values)) if values else None,
                "p95": float(np.percentile(values, 95)) if values else None,
                "missing": len(of) - len(values),
            }
        found[role] = figures
    return found


def attainment(ended: Sequence[Ended], kills: Sequence[Kill]) -> dict[str, Any]:
    """Shares of requests that met their objectives, by class and time, and by the role killed.

    A request is `during` a kill if it was open within `DURING_S` after it, else `after`.
    """
    groups: dict[tuple[str, str], list[bool]] = {}
    roles: dict[tuple[str, str], list[bool]] = {}
    for one in ended:
        near = {
            kill.role for kill in kills if one.sent_s <= kill.at_s + DURING_S and one.ended_s >= kill.at_s
        }
        groups.setdefault((one.domain, "during" if near else "after"), []).append(one.attained)
        for role in near:
            roles.setdefault((role, one.domain), []).append(one.attained)
    return {"by_time": _shares(groups), "by_role": _shares(roles)}


def _shares(groups: Mapping[tuple[str, str], Sequence[bool]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (outer, inner), values in sorted(groups.items()):
        found.setdefault(outer, {})[inner] = {"requests": len(values), "attained": sum(values) / len(values)}
    return found


def unexplained_breaks(ended: Sequence[Ended], kills: Sequence[Kill], margin_s: float = 1.0) -> int:
    """Attempts whose connection broke at a time when no front end was away."""
    away = [
        (
            kill.at_s - 0.1,
            kill.at_s + (kill.replaced_s if kill.replaced_s is not None else DURING_S) + margin_s,
        )
        for kill in kills
        if kill.role == "front_end"
    ]
    return sum(
        how == "broken" and not any(begin <= at <= end for begin, end in away)
        for one in ended
        for _, _, at, how in one.attempts
    )
