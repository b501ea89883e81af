"""Results of fleets as tables, a picture over time, and a report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.plot_style import COLOURS, STYLE
from simulator.fleet.run import FleetResult
from simulator.fleet.scenario import Scenario

_HEADINGS = (
    "scaling",
    "router",
    "attained",
    "GPU hours",
    "attained per GPU hour",
    "mean cells",
    "most",
    "changes",
    "refused",
    "TTFT p50 / p99 ms",
    "TPOT p50 / p99 ms",
)
_DETAILED = "Every cell has the scheduler that serves."
_LARGE = "Cells follow a response surface."
# Decisions of a report; more are told by their number.
_MOST_DECISIONS = 40


def table(results: Sequence[FleetResult]) -> Table:
    """One row per run."""
    shown = Table(title=results[0].scenario)
    for heading in _HEADINGS:
        shown.add_column(heading, justify="left" if heading in ("scaling", "router") else "right")
    for result in results:
        shown.add_row(*_row(result))
    return shown


def markdown(scenario: Scenario, results: Sequence[FleetResult], plot: str | None) -> str:
    """Runs in a table, the classes and decisions of the first, and its picture.

    Args:
        scenario: of the runs.
        results: of the runs.
        plot: where the picture lies, seen from where the report does; None without one.
    """
    first = results[0]
    lines = [f"# {scenario.name}", ""]
    lines += [
        f"{scenario.profile}, {scenario.system}, {scenario.gpus_per_cell} GPUs per cell, "
        f"{scenario.cells.min} to {scenario.cells.max} cells; {first.all.num_requests:,} requests in "
        f"{scenario.arrivals.seconds:g} s. " + (_DETAILED if first.is_detailed else _LARGE),
        "",
    ]
    lines += _table(_HEADINGS, [_row(result) for result in results])
    lines += ["", f"Classes, {first.scaling} and {first.router}:", ""]
    lines += _table(
        (
            "class",
            "requests",
            "attained",
            "refused",
            "unfinished",
            "tokens/s",
            "TTFT p50 / p99",
            "TPOT p50 / p99",
        ),
        [
            [
                name,
                f"{one.num_requests:,}",
                f"{one.attainment:.2%}",
                f"{one.num_refused:,}",
                f"{one.num_unfinished:,}",
                f"{one.tokens_per_s:,.0f}",
                f"{one.ttft_ms[1]:.0f} / {one.ttft_ms[2]:.0f}",
                f"{one.tpot_ms[1]:.1f} / {one.tpot_ms[2]:.1f}",
            ]
            for name, one in first.classes.items()
        ],
    )
    if plot is not None:
        lines += ["", f"![Rate, cells, attainment and queue over time]({plot})"]
    lines += ["", f"Decisions, {len(first.decisions)} in all, {first.num_lost} cells lost:", ""]
    held = [
        [f"{one.at_s:.0f}", f"{one.before} to {one.after}", str(one.serving), one.reason]
        for one in first.decisions[:_MOST_DECISIONS]
    ]
    lines += _table(("at s", "cells wanted", "serving", "why"), held)
    lines += ["", _directions(first)]
    return "\n".join(lines) + "\n"


def draw(result: FleetResult, path: Path) -> None:
    """Rate, cells, attainment by class and queue over time, as a PNG."""
    minutes = [one.at_s / 60.0 for one in result.moments]
    with mpl.rc_context({**STYLE, "savefig.dpi": 80, "font.size": 9}):
        canvas = Figure(figsize=(7.5, 8.0))
        rate, cells, attained, queue = canvas.subplots(4, 1, sharex=True)
        rate.plot(minutes, [one.rate for one in result.moments], color=COLOURS[0])
        rate.set_ylabel("requests/s")
        for index, name in enumerate(("wanted", "serving", "starting", "draining")):
            cells.plot(
                minutes, [getattr(one, name) for one in result.moments], color=COLOURS[index], label=name
            )
        cells.set_ylabel("cells")
        cells.legend(fontsize=7)
        for index, name in enumerate(result.classes):
            shares = [one.attainment[name] for one in result.moments]
            attained.plot(
                minutes,
                [None if share is None else 100.0 * share for share in shares],
                color=COLOURS[index],
                label=name,
            )
        attained.set_ylabel("attained (%)")
        attained.legend(fontsize=7)
        queue.plot(minutes, [one.queue_ms for one in result.moments], color=COLOURS[0])
        queue.set_ylabel("predicted queue (ms)")
        queue.set_xlabel("minutes")
        canvas.savefig(path)


def _row(result: FleetResult) -> list[str]:
    one = result.all
    return [
        result.scaling if result.decisions or result.scaling != "fixed" else f"fixed at {result.most_cells}",
        result.router,
        f"{one.attainment:.2%}",
        f"{result.gpu_hours:,.1f}",
        f"{result.attained_per_gpu_hour:,.0f}",
        f"{result.mean_cells:.1f}",
        str(result.most_cells),
        str(len(result.decisions)),
        f"{one.num_refused:,}",
        f"{one.ttft_ms[1]:.0f} / {one.ttft_ms[2]:.0f}",
        f"{one.tpot_ms[1]:.1f} / {one.tpot_ms[2]:.1f}",
    ]


def _directions(result: FleetResult) -> str:
    """How the decisions went on: runs of them in one direction."""
    runs = groupby(result.decisions, key=lambda one: one.after > one.before)
    told = []
    for is_more, group in runs:
        held = list(group)
        told.append(
            f"{'up' if is_more else 'down'} from {held[0].before} to {held[-1].after} "
            f"({held[0].at_s:.0f} to {held[-1].at_s:.0f} s, {len(held)} changes)"
        )
    return "In short: " + ("; ".join(told) if told else "no change") + "."


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
