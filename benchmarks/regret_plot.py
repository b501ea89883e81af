"""The plot of `flotilla bench regret`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plot_style import COLOURS, STYLE

_OF_SELECTOR = {
    "flotilla": "black",
    "lbss": COLOURS[0],
    "epsilon-greedy": COLOURS[1],
    "greedy-length": COLOURS[2],
    "fixed": COLOURS[3],
}


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw regret against slots on two scales and what happens after a shift; makes the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(15, 4.6))
        left, middle, right = figure.subplots(1, 3)
        _all(left, record)
        _logarithmic(middle, record)
        _shift(right, record)
        figure.savefig(path)


def _line(
    axes: Axes, slots: list[int], curve: Mapping[str, Any], colour: str, label: str, style: str = "-"
) -> None:
    axes.plot(slots, np.maximum(curve["mean"], 0.1), style, color=colour, label=label)
    low, high = (np.maximum(curve[side], 0.1) for side in ("low", "high"))
    axes.fill_between(slots, low, high, color=colour, alpha=0.12, linewidth=0)


def _all(axes: Axes, record: Mapping[str, Any]) -> None:
    for name, figures in record["stationary"].items():
        _line(axes, record["slots"], figures["regret_with_switching"], _OF_SELECTOR[name], name)
        if "regret_with_switching_and_reading" in figures:
            curve = figures["regret_with_switching_and_reading"]
            _line(axes, record["slots"], curve, _OF_SELECTOR[name], f"{name}, reading charged", ":")
    axes.set(xscale="log", yscale="log", xlabel="slots", ylabel="regret (tokens), switching included")
    axes.set_xscale("log", base=2)
    axes.set_title("Stationary")
    axes.legend(fontsize=8)


def _logarithmic(axes: Axes, record: Mapping[str, Any]) -> None:
    figures, growth = record["stationary"]["lbss"], record["lbss_growth"]
    for key, label, style in (
        ("regret", "lbss", "-"),
        ("regret_with_switching", "lbss with switching cost", "--"),
    ):
        _line(axes, record["slots"], figures[key], _OF_SELECTOR["lbss"], label, style)
        if "exponent" in growth[key]:
            axes.plot(
                growth["epoch_ends"], growth[key]["mean"], "o", color=_OF_SELECTOR["lbss"], markersize=4
            )
    ours = record["stationary"]["flotilla"]["regret_with_switching"]
    _line(axes, record["slots"], ours, _OF_SELECTOR["flotilla"], "flotilla with switching cost", "--")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="slots", ylabel="regret (tokens)", title="O(log T) is a straight line (dots: ends of epochs)"
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _shift(axes: Axes, record: Mapping[str, Any]) -> None:
    for name, figures in record["shift"]["selectors"].items():
        _line(axes, record["shift"]["slots"], figures["regret_after"], _OF_SELECTOR[name], name)
    axes.set_xscale("log", base=2)
    axes.set(
        yscale="log",
        xlabel=f"slots since drafters changed (slot {record['shift']['slot']:,})",
        ylabel="regret since then (tokens)",
        title="A drafter got worse, another better",
    )
    axes.legend(fontsize=8)
