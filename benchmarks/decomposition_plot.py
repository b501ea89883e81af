"""The plot of `flotilla bench decomposition`: verify steps and padding by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.decomposition_attention import METHODS
from benchmarks.plot_style import COLOURS, STYLE

if TYPE_CHECKING:
    from benchmarks.decomposition import Measured


def draw(found: Sequence[Measured], path: Path) -> None:
    """Write the plot: for each model, milliseconds of a verify step, and keys of padding."""
    shapes = list(dict.fromkeys(row.shape for row in found))
    panels = (("step_ms", "verify step, ms"), ("padded_tokens", "keys of padding"))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.0 * len(shapes) + 1.8, 6.0))
        grid = figure.subplots(len(panels), len(shapes), squeeze=False)
        for column, shape in enumerate(shapes):
            rows = [row for row in found if row.shape == shape]
            batches = sorted({row.batch for row in rows})
            for line, (name, label) in enumerate(panels):
                axes = grid[line, column]
                for place, method in enumerate(METHODS):
                    held = {row.batch: float(getattr(row, name)) for row in rows if row.method == method}
                    axes.bar(
                        np.arange(len(batches)) + 0.14 * (place - (len(METHODS) - 1) / 2),
                        [held[batch] for batch in batches],
                        width=0.13,
                        color=COLOURS[place],
                        label=method,
                    )
                axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
                axes.set_ylabel(label)
                axes.grid(visible=False, axis="x")
                if line == 0:
                    axes.set_title(shape, fontsize=10)
            grid[-1, column].set_yscale("symlog", linthresh=10)
            grid[-1, column].set_xlabel("requests in the step")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        figure.savefig(path)
