"""Times of the same requests under two policies, request by request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.compare_statistics import Interval, mean_of

# A request of a run: when it was sent, its class, and which of those it is.
Key = tuple[float, str, int]


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """How long requests took under a policy, as multiples of what the same ones took under another.

    Geometric means over requests with 95 % bootstrap intervals. Requests differ in length by far more than
    policies do in speed, so pairs tell policies apart where attainment of so few requests cannot. What the
    intervals leave out is that the machine may have changed between two runs.

    Attributes:
        policy, reference: which are compared.
        num_pairs: requests that both completed.
        tpot: time per output token, of answers of several tokens.
        ttft: time to the first token.
        latency: until the last token.
    """

    policy: str
    reference: str
    num_pairs: int
    tpot: Interval
    ttft: Interval
    latency: Interval


def paired_times(
    policy: str, reference: str, runs: Mapping[str, Mapping[int, Mapping[str, Any]]]
) -> PairedTimes:
    """The policy against the reference, over all seeds that both have.

    Args:
        policy, reference: labels.
        runs: by label and seed, all at one point.
    """
    pairs = [
        pair
        for seed, run in runs[policy].items()
        if seed in runs[reference]
        for pair in _pairs(run["requests"], runs[reference][seed]["requests"])
    ]
    return PairedTimes(
        policy=policy,
        reference=reference,
        num_pairs=len(pairs),
        tpot=_ratio([(own["tpot_ms"], other["tpot_ms"]) for own, other in pairs]),
        ttft=_ratio([(own["ttft_ms"], other["ttft_ms"]) for own, other in pairs]),
        latency=_ratio([(_latency_ms(own), _latency_ms(other)) for own, other in pairs]),
    )


def _pairs(
    own: Mapping[str, Sequence[Any]], other: Mapping[str, Sequence[Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Requests that both runs completed."""
    mine, theirs = _by_key(own), _by_key(other)
    shared = [(row, theirs[key]) for key, row in mine.items() if key in theirs]
    return [pair for pair in shared if not any(row["error"] for row in pair)]


def _by_key(columns: Mapping[str, Sequence[Any]]) -> dict[Key, dict[str, Any]]:
    """Rows of a run's columns; those sent at the same time are told apart by their order."""
    seen: Counter[tuple[float, str]] = Counter()
    found = {}
    for place in range(len(columns["arrival_s"])):
        row = {name: column[place] for name, column in columns.items()}
        sent = (row["arrival_s"], row["domain"])
        found[*sent, seen[sent]] = row
        seen[sent] += 1
    return found


def _latency_ms(row: Mapping[str, Any]) -> float | None:
    if row["ttft_ms"] is None:
        return None
    latency_ms: float = row["ttft_ms"] + (row["tpot_ms"] or 0.0) * max(0, row["tokens"] - 1)
    return latency_ms


def _ratio(pairs: Sequence[tuple[float | None, float | None]]) -> Interval:
    """The geometric mean of first over second, of pairs that have both."""
    logs = mean_of([float(np.log(own / other)) for own, other in pairs if own and other])
    return Interval(
        *(None if bound is None else float(np.exp(bound)) for bound in (logs.mean, logs.low, logs.high))
    )
