"""Tables of a comparison for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

from benchmarks.compare_statistics import AgainstBest, Interval, PolicyFigures
from benchmarks.paired_times import PairedTimes
from benchmarks.tables import number, percent, plain_table


def share(interval: Interval) -> str:
    """A share with its interval, in percent: `91.2 [90.1, 92.0]`."""
    if interval.mean is None:
        return "-"
    scaled = Interval(*(None if part is None else 100.0 * part for part in _parts(interval)))
    return with_interval(scaled, 1)


def with_interval(interval: Interval, digits: int) -> str:
    """A mean with its interval, where there is one."""
    text = number(interval.mean, digits)
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return text
    return f"{text} [{number(interval.low, digits)}, {number(interval.high, digits)}]"


def _parts(interval: Interval) -> tuple[float | None, float | None, float | None]:
    return interval.mean, interval.low, interval.high


def objective_table(title: str, rows: Sequence[PolicyFigures]) -> Table:
    """Attainment, goodput and latency of all policies at one point."""
    classes = sorted({name for row in rows for name in row.by_class})
    heads = ["policy", "attained %", *classes, "good req/s", "good tokens/s", "TPOT p50 / p95", "failed"]
    return plain_table(
        title,
        heads,
        [
            [
                row.policy,
                share(row.attainment),
                *(percent(row.by_class[name].mean if name in row.by_class else None) for name in classes),
                number(row.goodput_requests_per_s.mean, 2),
                with_interval(row.goodput_tokens_per_s, 0),
                f"{number(row.tpot_p50_ms.mean, 2)} / {number(row.tpot_p95_ms.mean, 2)}",
                f"{row.num_errors} of {row.num_requests}" if row.num_errors else "",
            ]
            for row in rows
        ],
    )


def step_table(rows: Sequence[PolicyFigures]) -> Table:
    """What the seconds of a step went into."""
    heads = ["policy", "accepted", "step ms", "drafting", "verifying", "other", "scheduler", "TTFT p95"]

    def of_step(part: Interval, whole: Interval) -> str:
        if part.mean is None or not whole.mean:
            return "-"
        return f"{part.mean:.2f} ({100 * part.mean / whole.mean:.0f}%)"

    return plain_table(
        "Decode steps: draft tokens accepted per request, milliseconds by what they went into (scheduler: "
        "processor time, part of other)",
        heads,
        [
            [
                row.policy,
                number(row.accepted_per_step.mean, 2),
                with_interval(row.step_ms, 2),
                of_step(row.draft_ms, row.step_ms),
                of_step(row.verify_ms, row.step_ms),
                of_step(row.other_ms, row.step_ms),
                of_step(row.scheduler_ms, row.step_ms),
                number(row.ttft_p95_ms.mean, 0),
            ]
            for row in rows
        ],
    )


def ratio(value: float | None) -> str:
    """Violations of the other over its own; infinite where only the other has any."""
    if value is None:
        return "-"
    return "infinite" if math.isinf(value) else f"{value:.2f}"


def best_table(found: Mapping[str, Sequence[AgainstBest]]) -> Table:
    """Our policy beside the best of the others, over the points."""
    heads = [
        "at",
        "policy",
        "best other",
        "attained, points more",
        "violations",
        "other's",
        "ratio",
        "goodput: over it",
        "over autoregressive",
    ]
    rows = []
    for point, entries in found.items():
        for entry in entries:
            gain = Interval(*(None if part is None else 100 * part for part in _parts(entry.attainment_gain)))
            rows.append(
                [
                    point,
                    entry.policy,
                    entry.baseline,
                    with_interval(gain, 1),
                    f"{entry.violations}",
                    f"{entry.baseline_violations}",
                    ratio(entry.violations_ratio),
                    with_interval(entry.goodput_ratio, 2),
                    with_interval(entry.goodput_over_plain, 2),
                ]
            )
    return plain_table("Beside the best of the other policies, paired by seed", heads, rows)


def paired_table(found: Mapping[str, Sequence[PairedTimes]]) -> Table:
    """Times of the same requests as multiples of one policy's, over the points."""
    heads = ["at", "policy", "over", "requests", "time per token", "first token", "latency"]
    rows = [
        [point, entry.policy, entry.reference, f"{entry.num_pairs:,}"]
        + [with_interval(each, 2) for each in (entry.tpot, entry.ttft, entry.latency)]
        for point, entries in found.items()
        for entry in entries
    ]
    return plain_table("The same requests, times as multiples of another policy's", heads, rows)


def sweep_table(found: Mapping[str, Sequence[PolicyFigures]]) -> Table:
    """Attainment of all policies over the points."""
    policies = list(dict.fromkeys(row.policy for rows in found.values() for row in rows))
    rows = []
    for policy in policies:
        cells = []
        for entries in found.values():
            held = [row for row in entries if row.policy == policy]
            cells.append(percent(held[0].attainment.mean) if held else "-")
        rows.append([policy, *cells])
    return plain_table("Attainment over the sweep", ["policy", *found], rows)
