"""Plots of figures: one panel per metric, the paper's axes, bars where the axis has names."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from benchmarks.plot_style import COLOURS, STYLE
from simulator.reproduction.claims import Results
from simulator.reproduction.spec import SPEEDUP

_LABELS = {
    "attainment": "SLO attainment (%)",
    "goodput": "goodput (tokens/s)",
    "throughput": "throughput (tokens/s)",
    "accepted tokens": "accepted draft tokens/s",
    "step goodput": "goodput of steps (tokens/s)",
    "tokens per step": "tokens per request and step",
    SPEEDUP: "speedup of mean latency",
}
_MARKS = "os^vD*Px<>"


def draw(results: Results, path: Path) -> None:
    """Write a PNG; intervals over seeds as bars."""
    figure = results.figure
    with mpl.rc_context({**STYLE, "savefig.dpi": 80, "font.size": 9}):
        canvas = Canvas(figsize=(4.6 * len(figure.metrics) + 1.6, 3.4))
        panels = canvas.subplots(1, len(figure.metrics), squeeze=False)[0]
        for panel, metric in zip(panels, figure.metrics, strict=True):
            _panel(results, metric, panel)
        panels[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        canvas.savefig(path)


def _panel(results: Results, metric: str, panel: Axes) -> None:
    figure, values = results.figure, results.values
    named = any(isinstance(value, str) for value in values)
    width = 0.8 / len(figure.series)
    for index, label in enumerate(figure.series):
        intervals = [results.interval(metric, label, value) for value in values]
        held = [(at, one) for at, one in enumerate(intervals) if one.mean is not None]
        means = [one.mean or 0.0 for _, one in held]
        low = [
            mean - (one.low if one.low is not None else mean)
            for mean, (_, one) in zip(means, held, strict=True)
        ]
        high = [
            (one.high if one.high is not None else mean) - mean
            for mean, (_, one) in zip(means, held, strict=True)
        ]
        colour = COLOURS[index % len(COLOURS)]
        if named:
            places = [at + (index + 0.5) * width - 0.4 for at, _ in held]
            panel.bar(
                places, means, width, yerr=[low, high], color=colour, label=label, error_kw={"linewidth": 0.8}
            )
        else:
            places = [float(values[at]) for at, _ in held]
            mark = _MARKS[index % len(_MARKS)]
            style = "--" if index >= len(COLOURS) else "-"
            panel.errorbar(
                places, means, yerr=[low, high], color=colour, marker=mark, markersize=4, linestyle=style,
                linewidth=1.2, capsize=2, label=label,
            )  # fmt: skip
    if named:
        panel.set_xticks(range(len(values)), [str(value) for value in values])
    panel.set_xlabel(figure.axis)
    panel.set_ylabel(_LABELS.get(metric, metric))
    panel.set_ylim(bottom=0)
