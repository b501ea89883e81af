"""Plots of a comparison: attainment and goodput over the sweep, TPOT distributions, parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.compare_plan import OURS
from benchmarks.compare_record import Record
from benchmarks.compare_statistics import Interval, PolicyFigures, by_policy
from benchmarks.compare_summary import PointSummary
from benchmarks.plot_style import COLOURS, STYLE

# Black is for the default policy.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h", "p")
_POINT = "point"
_PARTS = {"draft_ms": "waiting for drafts", "verify_ms": "verifying", "other_ms": "other"}
_PART_COLOURS = ("#56B4E9", "#0072B2", "#BBBBBB")


def draw(record: Record, summary: Sequence[PointSummary], directory: Path) -> list[Path]:
    """Draw everything into the directory, which is made if need be; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        drawn = {
            "attainment": attainment(record, summary),
            "goodput": goodput(record, summary),
            "steps": steps(summary),
        }
        for point in summary:
            name = "tpot" if len(summary) == 1 else f"tpot-{point.key.replace('=', '').replace(',', '-')}"
            drawn[name] = tpot_distributions(record, point)
        paths = []
        for name, figure in drawn.items():
            path = directory / f"{name}.png"
            figure.savefig(path)
            paths.append(path)
    return paths


def axis_of(record: Record, summary: Sequence[PointSummary]) -> tuple[str, list[float]]:
    """What the points differ in: a label and each one's place; the rate if they differ in several things."""
    held = [record.points.get(point.key, {}) for point in summary]
    for name, label in (
        ("requests_per_s", "requests per second"),
        ("slo_scale", "objective of the urgent class / baseline latency"),
        ("urgent_share", "share of urgent requests"),
    ):
        values = [point.get(name) for point in held]
        if None not in values and len(set(values)) > 1:
            return label, [float(value) for value in values if value is not None]
    return _POINT, [float(place) for place in range(len(summary))]


def _style(policies: Sequence[str], policy: str) -> dict[str, Any]:
    """Colour, line and marker of a policy: ours in bold black, the others by their place among themselves."""
    is_ours = _is_ours(policy)
    place = [name for name in policies if _is_ours(name) == is_ours].index(policy)
    colours = ("black",) if is_ours else COLOURS
    return {
        "color": colours[place % len(colours)],
        "linestyle": ("-", "--", ":")[place // len(colours) % 3],
        "linewidth": 2.4 if is_ours else 1.3,
        "zorder": 5 if is_ours else 3,
        "marker": _MARKERS[policies.index(policy) % len(_MARKERS)],
        "markersize": 5,
    }


def _is_ours(policy: str) -> bool:
    return policy.partition(":")[0] == OURS


def _policies(summary: Sequence[PointSummary]) -> list[str]:
    return list(dict.fromkeys(row.policy for point in summary for row in point.policies))


def _row(point: PointSummary, policy: str) -> PolicyFigures | None:
    return next((row for row in point.policies if row.policy == policy), None)


def _line(
    axes: Any, places: Sequence[float], values: Sequence[Interval], style: Mapping[str, Any], label: str
) -> None:
    """A line over the sweep, with bars from the lower to the upper bounds."""
    held = sorted(
        ((place, value) for place, value in zip(places, values, strict=True) if value.mean is not None),
        key=lambda pair: pair[0],
    )
    if not held:
        return
    mean = np.array([value.mean for _, value in held])
    low = np.array([value.mean if value.low is None else value.low for _, value in held])
    high = np.array([value.mean if value.high is None else value.high for _, value in held])
    bars = np.maximum(0.0, [mean - low, high - mean])
    axes.errorbar([place for place, _ in held], mean, bars, label=label, elinewidth=0.8, capsize=2, **style)


def _percent(value: Interval) -> Interval:
    parts = (value.mean, value.low, value.high)
    return Interval(*(None if part is None else 100 * part for part in parts))


def attainment(record: Record, summary: Sequence[PointSummary]) -> Figure:
    """Attainment over the sweep: of all requests, and of each class."""
    label, places = axis_of(record, summary)
    classes = sorted({name for point in summary for row in point.policies for name in row.by_class})
    panels = ["all classes", *classes] if len(classes) > 1 else ["all classes"]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns + 1.8, 3.6 * rows))
    grid = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        for policy in _policies(summary):
            values = []
            for point in summary:
                row = _row(point, policy)
                value = Interval(None)
                if row is not None:
                    value = row.attainment if panel == "all classes" else row.by_class.get(panel, value)
                values.append(_percent(value))
            _line(axes, places, values, _style(_policies(summary), policy), policy)
        axes.set_title(panel)
        axes.set_ylim(-3, 103)
    _name_points(grid[: len(panels)], label, summary)
    _finish(figure, grid, panels, label, "requests that met their objectives, %")
    return figure


def goodput(record: Record, summary: Sequence[PointSummary]) -> Figure:
    """Tokens and requests per second of those that met their objectives, over the sweep."""
    label, places = axis_of(record, summary)
    figure = Figure(figsize=(12.2, 4.0))
    grid = figure.subplots(1, 2, sharex=True)
    panels = {"tokens per second": "goodput_tokens_per_s", "requests per second": "goodput_requests_per_s"}
    for axes, (title, name) in zip(grid, panels.items(), strict=True):
        for policy in _policies(summary):
            rows = [_row(point, policy) for point in summary]
            values = [Interval(None) if row is None else getattr(row, name) for row in rows]
            _line(axes, places, values, _style(_policies(summary), policy), policy)
        axes.set_title(title)
        axes.set_ylim(bottom=0)
    _name_points(grid, label, summary)
    _finish(figure, grid, list(panels), label, "goodput of requests that met their objectives")
    return figure


def _name_points(grid: Any, label: str, summary: Sequence[PointSummary]) -> None:
    """Points that differ in no one number are named."""
    if label == _POINT:
        for axes in grid:
            axes.set_xticks(range(len(summary)), [point.key for point in summary])


def _finish(figure: Figure, grid: Any, panels: Sequence[str], xlabel: str, ylabel: str) -> None:
    """Labels, one legend beside all panels, and no empty panels."""
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(xlabel, fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)


def steps(summary: Sequence[PointSummary]) -> Figure:
    """Mean decode step of each policy, by what its time went into; a panel per point."""
    columns = min(3, len(summary))
    rows = -(-len(summary) // columns)
    policies = _policies(summary)
    figure = Figure(figsize=(4.2 * columns + 1.6, (0.32 * len(policies) + 1.2) * rows))
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for axes, point in zip(grid, summary, strict=False):
        left = np.zeros(len(policies))
        for (name, label), colour in zip(_PARTS.items(), _PART_COLOURS, strict=True):
            rows_held = [_row(point, policy) for policy in policies]
            width = np.array([(getattr(row, name).mean or 0.0) if row else 0.0 for row in rows_held])
            axes.barh(policies, width, left=left, color=colour, label=label, height=0.7)
            left += width
        axes.grid(visible=False, axis="y")
        axes.set_title(point.key, fontsize=10)
    grid[0].invert_yaxis()  # shared by all panels: the first policy on top
    _finish(figure, grid, [point.key for point in summary], "milliseconds per decode step", "")
    return figure


def tpot_distributions(record: Record, point: PointSummary) -> Figure:
    """Share of requests up to each TPOT by policy, a panel per class with its objective."""
    held = by_policy(record.runs, point.key)
    requests = {
        policy: [row for run in held.get(policy, {}).values() for row in _rows(run)]
        for policy in _policies([point])
    }
    classes = sorted({row["domain"] for rows in requests.values() for row in rows})
    figure = Figure(figsize=(4.0 * max(1, len(classes)) + 1.8, 3.6))
    grid = figure.subplots(1, max(1, len(classes)), sharey=True, squeeze=False).ravel()
    for axes, domain in zip(grid, classes, strict=False):
        mine = {name: [row for row in rows if row["domain"] == domain] for name, rows in requests.items()}
        limits = {row["slo_tpot_ms"] for rows in mine.values() for row in rows} - {None}
        for policy, rows in mine.items():
            values = np.sort([row["tpot_ms"] for row in rows if row["tpot_ms"] is not None])
            if len(values):
                # A failed request never arrives, so the curve of a policy with failures ends below 100 %; an
                # answer of one token has no time per token, and is no failure.
                failed = sum(bool(row["error"]) for row in rows if row["tpot_ms"] is None)
                share = 100 * np.arange(len(values) + 1) / (len(values) + failed)
                values = np.concatenate([values[:1], values])
                style = _style(list(mine), policy)
                style = {key: value for key, value in style.items() if "marker" not in key}
                axes.step(values, share, where="post", label=policy, **style)
        for limit in limits if len(limits) == 1 else ():
            axes.axvline(limit, color="#D00000", linestyle="--", linewidth=1)
            axes.annotate(
                f"objective {limit:.1f} ms",
                (limit, 2),
                rotation=90,
                ha="right",
                va="bottom",
                color="#D00000",
                fontsize=8,
            )
        axes.set_title(domain)
        axes.set_ylim(0, 102)
    _finish(figure, grid, classes, "mean time per output token, ms", "requests, %")
    figure.suptitle(point.title.split(", ")[0], fontsize=10)
    return figure


def _rows(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The requests of a run, one mapping each."""
    columns = run["requests"]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
