"""What an overload did: attainment by tier and phase, whether refusals were true, recovery, fairness."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.overload_load import SERVED, SHARES, Arrival, Attempt, Phases

PHASES = ("before", "during", "after")


def summary(attempts: Sequence[Attempt], phases: Phases) -> dict[str, Any]:
    """All figures, as written to the JSON file."""
    first = [one for one in attempts if one.number == 0]
    others = [one for one in first if one.key != phases.greedy]
    return {
        "tiers": {tier: _by_phase([one for one in first if one.tier == tier], phases) for tier in SHARES},
        "keys": {
            key: _by_phase([one for one in first if one.key == key and one.tier in SERVED], phases)
            for key in sorted(phases.usual)
        },
        "tokens_during": tokens(attempts, phases),
        "refusals": {tier: refusals([one for one in attempts if one.tier == tier]) for tier in SHARES},
        "recovery_s": recovery_s(first, phases),
        "recovery_of_others_s": recovery_s(others, phases),
        "errors": sorted({one.error for one in attempts if one.error})[:20],
        "num_errors": sum(bool(one.error) for one in attempts),
    }


def _by_phase(attempts: Sequence[Attempt], phases: Phases) -> dict[str, Any]:
    return {phase: part([one for one in attempts if phases.of(one.sent_s) == phase]) for phase in PHASES}


def part(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Counts of requests as first sent; attainment of those taken, and of all, refused ones as missed."""
    taken = [one for one in attempts if not one.is_refused]
    attained = sum(one.attained for one in taken)
    ttfts = [one.ttft_ms for one in taken if one.ttft_ms is not None]
    return {
        "num_sent": len(attempts),
        "num_refused": len(attempts) - len(taken),
        "attained_of_taken": attained / len(taken) if taken else None,
        "attained_of_sent": attained / len(attempts) if attempts else None,
        "ttft_ms_median": statistics.median(ttfts) if ttfts else None,
    }


def refusals(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Whether those who came back when told were taken, and when others like them were.

    `could_s` is the time from a refusal to the next request of the same key and tier that was taken: an upper
    bound of how early the refused one could have come.
    """
    refused = [one for one in attempts if one.is_refused]
    returned = {(one.arrival, one.number): one for one in attempts}
    true = [
        not returned[one.arrival, one.number + 1].is_refused
        for one in refused
        if (one.arrival, one.number + 1) in returned
    ]
    told = [one.told_s for one in refused if one.told_s is not None]
    could = []
    for one in refused:
        later = [
            other.sent_s - one.sent_s
            for other in attempts
            if not other.is_refused and other.key == one.key and other.sent_s > one.sent_s
        ]
        if later and one.told_s is not None:
            could.append(min(later))
    return {
        "num_refused": len(refused),
        "num_without_time": sum(one.told_s is None for one in refused),
        "num_came_back": len(true),
        "num_taken_then": sum(true),
        "told_s_median": statistics.median(told) if told else None,
        "told_s_most": max(told, default=None),
        "could_s_median": statistics.median(could) if could else None,
    }


def recovery_s(first: Sequence[Attempt], phases: Phases) -> float | None:
    """Seconds after the overload until every request sent from then on was taken and on time.

    None if none was from then on: the last was refused or late, or there were none.
    """
    after = [one for one in first if one.sent_s >= phases.ends_s and one.tier in SERVED]
    last = max(after, key=lambda one: one.sent_s, default=None)
    if last is None or not last.attained:
        return None
    return max((one.sent_s - phases.ends_s for one in after if not one.attained), default=0.0)


def lateness(attempts: Sequence[Attempt], arrivals: Sequence[Arrival]) -> dict[str, float | None]:
    """How many seconds after they were due requests were first sent: what the client was behind."""
    late = [one.sent_s - arrivals[one.arrival].at_s for one in attempts if one.number == 0]
    return {
        "median": statistics.median(late) if late else None,
        "p99": float(np.percentile(late, 99)) if late else None,
        "most": max(late, default=None),
    }


def tokens(attempts: Sequence[Attempt], phases: Phases) -> dict[str, int]:
    """Tokens of requests sent during the overload and served, by key."""
    found: dict[str, int] = dict.fromkeys(sorted(phases.usual), 0)
    for one in attempts:
        if phases.of(one.sent_s) == "during" and not one.is_refused:
            found[one.key] += one.num_tokens
    return found


def series(attempts: Sequence[Attempt], window_s: float) -> Mapping[str, list[tuple[float, float]]]:
    """Attainment of requests as first sent over time, by tier, in windows."""
    found: dict[str, dict[int, list[bool]]] = {tier: {} for tier in SHARES}
    for one in attempts:
        if one.number == 0:
            found[one.tier].setdefault(int(one.sent_s // window_s), []).append(one.attained)
    return {
        tier: [((window + 0.5) * window_s, sum(of) / len(of)) for window, of in sorted(windows.items())]
        for tier, windows in found.items()
    }
