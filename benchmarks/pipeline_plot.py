"""Plot of `flotilla bench pipeline`: goodput against the number of micro-batches (SPIN, figure 13)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.pipeline import AUTO, NO_OVERLAP, PLAIN, SPIN
from benchmarks.plot_style import COLOURS, STYLE


def draw(record: Mapping[str, Any], path: Path) -> None:
    """One panel for each batch; the choices of SPIN's heuristic and of `auto` are marked."""
    with mpl.rc_context(STYLE):
        batches = record["batches"]
        figure = Figure(figsize=(4.2 * len(batches), 3.6))
        panels = figure.subplots(1, len(batches), squeeze=False)[0]
        for axes, (batch, part) in zip(panels, batches.items(), strict=True):
            goodput = part["goodput"]
            counts = sorted(int(name) for name in goodput if name.isdigit())
            axes.plot(counts, [goodput[str(count)] for count in counts], "o-", color="black", markersize=4)
            for name, colour, marker in ((SPIN, "#D55E00", "o"), (AUTO, "#0072B2", "D")):
                chosen = part["chosen"][name]
                axes.plot(
                    chosen["count"],
                    chosen["goodput"],
                    marker,
                    color=colour,
                    markersize=9,
                    linestyle="none",
                    label=name,
                    zorder=5,
                )
            for name, style, colour in ((NO_OVERLAP, "--", COLOURS[2]), (PLAIN, ":", COLOURS[3])):
                axes.axhline(goodput[name], linestyle=style, color=colour, label=name)
            axes.set_title(f"{batch} requests")
            axes.set_xlabel("micro-batches")
            axes.set_xticks(counts)
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        panels[0].set_ylabel("tokens per second")
        panels[0].legend(loc="lower left", fontsize=8)
        figure.savefig(path)
