"""Times of the same requests under two policies, request by request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from benchmarks.compare_statistics import Interval, ratio_of

# A request of a run: when it was sent, its class, and which of those it is.
Key = tuple[float, str, int]
# A request and what came of it, by column.
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """How long requests took under a policy, as multiples of what the same ones took under another.

    Geometric means over requests. Requests differ in length by far more than policies do in speed, so pairs
    tell policies apart where attainment of so few requests cannot. The 95 % bootstrap intervals are over
    seeds, whose requests stay together: those of one run share its queue and the machine's pace at the time,
    so that each by itself would count the same luck many times. No bounds with a single seed.

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
    by_seed = [
        _pairs(run["requests"], runs[reference][seed]["requests"])
        for seed, run in runs[policy].items()
        if seed in runs[reference]
    ]

    def ratio(time: Callable[[Row], float | None]) -> Interval:
        return _ratio([[(time(own), time(other)) for own, other in pairs] for pairs in by_seed])

    return PairedTimes(
        policy=policy,
        reference=reference,
        num_pairs=sum(map(len, by_seed)),
        tpot=ratio(itemgetter("tpot_ms")),
        ttft=ratio(itemgetter("ttft_ms")),
        latency=ratio(_latency_ms),
    )


def _pairs(own: Mapping[str, Sequence[Any]], other: Mapping[str, Sequence[Any]]) -> list[tuple[Row, Row]]:
    """Requests that both runs completed."""
    mine, theirs = _by_key(own), _by_key(other)
    shared = [(row, theirs[key]) for key, row in mine.items() if key in theirs]
    return [pair for pair in shared if not any(row["error"] for row in pair)]


def _by_key(columns: Mapping[str, Sequence[Any]]) -> dict[Key, Row]:
    """Rows of a run's columns; those sent at the same time are told apart by their order."""
    seen: Counter[tuple[float, str]] = Counter()
    found = {}
    for place in range(len(columns["arrival_s"])):
        row = {name: column[place] for name, column in columns.items()}
        sent = (row["arrival_s"], row["domain"])
        found[*sent, seen[sent]] = row
        seen[sent] += 1
    return found


def _latency_ms(row: Row) -> float | None:
    if row["ttft_ms"] is None:
        return None
    latency_ms: float = row["ttft_ms"] + (row["tpot_ms"] or 0.0) * max(0, row["tokens"] - 1)
    return latency_ms


def _ratio(by_seed: Sequence[Sequence[tuple[float | None, float | None]]]) -> Interval:
    """The geometric mean of first over second, of pairs that have both, with an interval over seeds."""
    logs = [[float(np.log(own / other)) for own, other in pairs if own and other] for pairs in by_seed]
    found = ratio_of([(sum(held), len(held)) for held in logs if held])
    return Interval(
        *(None if bound is None else float(np.exp(bound)) for bound in (found.mean, found.low, found.high))
    )
