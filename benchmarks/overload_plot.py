"""Plot of `flotilla bench overload`: attainment by tier over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.plot_style import COLOURS, STYLE


def draw(record: Mapping[str, Any], path: Path) -> None:
    """A line for each tier; the overload is shaded."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 3.5))
        axes = figure.subplots()
        for colour, (tier, points) in zip(COLOURS, record["attainment"].items(), strict=False):
            axes.plot(
                [at for at, _ in points], [share for _, share in points], ".-", color=colour, label=tier
            )
        begins, ends = record["overload_s"]
        axes.axvspan(begins, ends, color=COLOURS[7], alpha=0.2)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("seconds")
        axes.set_ylabel("taken and on time, of all sent")
        axes.legend()
        figure.savefig(path)
