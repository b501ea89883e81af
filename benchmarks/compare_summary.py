"""All figures of a comparison, point by point: computed, printed, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import compare_outputs, tables
from benchmarks.compare_plan import PLAIN
from benchmarks.compare_record import Record
from benchmarks.compare_statistics import AgainstBest, PolicyFigures, against_best, by_policy, figures
from benchmarks.compare_tables import best_table, objective_table, paired_table, step_table, sweep_table
from benchmarks.paired_times import PairedTimes, paired_times


@dataclass(frozen=True, slots=True)
class PointSummary:
    """A point of the sweep.

    Attributes:
        key: its name.
        title: what it stands for, for people.
        policies: figures by policy, in the order asked for.
        against_best: our policies beside the best of the others.
        paired: the other policies' times against plain decoding's, or the first policy's where that was not
            run, of the same requests.
    """

    key: str
    title: str
    policies: list[PolicyFigures]
    against_best: list[AgainstBest]
    paired: list[PairedTimes]


def summarise(
    record: Record, labels: Sequence[str], points: Sequence[str], ours: Sequence[str]
) -> list[PointSummary]:
    """The figures of the policies and points asked for, as far as the record has them.

    Args:
        record: what was measured.
        labels: policies.
        points: keys of points, in the order wanted.
        ours: those of the policies that are compared with the best of the others.
    """
    found = []
    for key in points:
        held = by_policy(record.runs, key)
        others = [label for label in labels if label not in ours]
        present = [label for label in labels if label in held]
        reference = PLAIN if PLAIN in present else next(iter(present), "")
        compared = [against_best(label, held, others, PLAIN) for label in ours]
        found.append(
            PointSummary(
                key=key,
                title=title_of(record, key),
                policies=[figures(label, list(held[label].values())) for label in present],
                against_best=[entry for entry in compared if entry is not None],
                paired=[paired_times(label, reference, held) for label in present if label != reference],
            )
        )
    return found


def title_of(record: Record, key: str) -> str:
    """What a point stands for: its load, and the objectives of each class."""
    point = record.points.get(key, {})
    parts = []
    if point.get("requests_per_s") is not None:
        rate = f"{point['requests_per_s']:.2f} requests/s"
        relative = (point.get("rate") or {}).get("relative")
        parts.append(rate + (f" ({point['rate']['value']:g} of saturation)" if relative else ""))
    else:
        parts.append("the workload's own arrivals")
    if point.get("urgent_share") is not None:
        parts.append(f"{100 * point['urgent_share']:.0f} % urgent")
    objectives = point.get("objectives") or {}
    if objectives:
        parts.append("; ".join(f"{domain} {text}" for domain, text in objectives.items()))
    return ", ".join(parts)


def show(record: Record, summary: Sequence[PointSummary]) -> None:
    """Print all tables."""
    tpot = next((slo["tpot_ms"] for slo in record.baseline.values()), None)
    tables.console.print(f"Baseline time per output token, without load: {tables.number(tpot, 2)} ms")
    if record.saturation is not None:
        tables.console.print(
            f"Saturation throughput without speculation: {tables.number(record.saturation, 2)} requests/s"
        )
    for point in summary:
        tables.console.print()
        tables.console.print(objective_table(point.title, point.policies))
        tables.console.print(step_table(point.policies))
    if len(summary) > 1:
        tables.console.print(sweep_table({point.key: point.policies for point in summary}))
    if any(point.against_best for point in summary):
        tables.console.print(best_table({point.key: point.against_best for point in summary}))
    if any(point.paired for point in summary):
        tables.console.print(paired_table({point.key: point.paired for point in summary}))
    tables.console.print(
        "In brackets: 95 % bootstrap intervals over seeds. Steps: seconds of whole decode iterations."
    )
    errors: dict[str, int] = {}
    for run in record.runs:
        for error, count in run["report"]["errors"].items():
            errors[error] = errors.get(error, 0) + count
    tables.print_errors(errors)
    compared, differing, unproven = compare_outputs.count(record.runs, record.outputs)
    colour = "red" if unproven else "green"
    tables.console.print(
        f"[{colour}]{compared:,} outputs compared with the first of their prompt: {differing} differ, "
        f"{differing - unproven} of them shown to be near ties.[/{colour}]",
        highlight=False,
    )


def to_json(summary: Sequence[PointSummary]) -> list[dict[str, Any]]:
    """Plain data."""
    return [asdict(point) for point in summary]
