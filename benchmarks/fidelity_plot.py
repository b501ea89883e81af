"""Plot of `flotilla bench fidelity`: served against simulated, by load (SmartSpec, figure 13)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.plot_style import COLOURS, STYLE

_PANELS = (
    ("latency_ms", "mean latency, ms"),
    ("ttft_ms", "time to first token, ms"),
    ("attainment", "attainment"),
    ("goodput_tokens_s", "goodput, tokens/s"),
)
# With "own costs" what forwards took is that of the test itself.
_KINDS = (("served", "-", "o"), ("simulated", "--", "x"), ("own costs", ":", "+"))


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A panel for each figure; every seed is a point, the means are lines."""
    policies = list(dict.fromkeys(point["policy"] for point in result["points"]))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.0 * len(_PANELS), 3.4))
        panels = figure.subplots(1, len(_PANELS))
        for axes, (name, label) in zip(panels, _PANELS, strict=True):
            for policy, colour in zip(policies, COLOURS, strict=False):
                held = [point for point in result["points"] if point["policy"] == policy]
                loads = [point["load"] for point in held]
                for column, (kind, style, marker) in enumerate(_KINDS):
                    means = [point["figures"][name][kind] for point in held]
                    axes.plot(loads, means, style, color=colour, label=f"{policy}, {kind}")
                    for point in held:
                        each = [found[column] for found in point["figures"][name]["by seed"]]
                        axes.plot([point["load"]] * len(each), each, marker, color=colour, markersize=4)
            axes.set_xlabel("load, share of saturation")
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
        lines = panels[0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=len(policies), fontsize=8)
        figure.savefig(path)
