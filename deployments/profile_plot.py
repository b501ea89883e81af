"""Predicted against measured forward time, a panel per model (SmartSpec figure 7)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from cluster.profile_file import ModelProfile, ProfileFile

COLUMNS = 3
# Width of the band around the diagonal: the error a profile should stay within in the median.
BAND = 0.10


def plot_profile(profile: ProfileFile, path: Path) -> None:
    """Write the plot; the file's ending says its format (png, svg, pdf)."""
    models = profile.models
    columns = min(COLUMNS, len(models))
    rows = math.ceil(len(models) / columns)
    figure = Figure(figsize=(4.2 * columns, 4.0 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, (name, model) in zip(panels, models.items(), strict=False):
        _panel(panel, name, model)
    for panel in panels[len(models) :]:
        panel.set_visible(False)
    clock = "processor time" if profile.clock == "cpu" else "wall time"
    title = f"Predicted against measured forwards, {profile.machine.hardware}, {clock}"
    figure.suptitle(title, fontsize=11, parse_math=False)
    figure.savefig(path, dpi=130)


def _panel(panel: Any, name: str, model: ModelProfile) -> None:
    measured = np.array([point.seconds for point in model.points]) * 1e3
    predicted = 1e3 * np.array(
        [model.cost.seconds(p.num_requests, p.num_tokens, p.num_context) for p in model.points]
    )
    held_out = np.array(model.held_out)
    low, high = min(measured.min(), predicted.min()) / 1.3, max(measured.max(), predicted.max()) * 1.3
    line = np.array([low, high])
    panel.fill_between(line, line * (1 - BAND), line * (1 + BAND), color="0.9", label=f"within {BAND:.0%}")
    panel.plot(line, line, color="0.5", linewidth=0.8)
    panel.scatter(
        measured[~held_out],
        predicted[~held_out],
        s=12,
        facecolors="none",
        edgecolors="tab:blue",
        linewidths=0.7,
        label="fitted",
    )
    panel.scatter(measured[held_out], predicted[held_out], s=14, color="tab:orange", label="held out")
    panel.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    panel.tick_params(labelsize=8)
    panel.set_xlabel("measured, ms", fontsize=9)
    panel.set_ylabel("predicted, ms", fontsize=9)
    title = f"{name}: median error {model.quality.median:.1%} held out"
    panel.set_title(title, fontsize=10, parse_math=False)  # a drafter's name may have any `$`
    panel.legend(fontsize=8, loc="upper left", frameon=False)
