"""Plot of `flotilla bench scaling`: load, cells and attainment over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.plot_style import COLOURS, STYLE

#: Seconds of requests that one point of attainment stands for.
_WINDOW_S = 5.0


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Three panels over the same time."""
    samples, requests = record["samples"], record["requests"]
    times = [sample["time_s"] for sample in samples]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 6.0))
        load, cells, attainment = figure.subplots(3, 1, sharex=True)
        load.step(times, [sample["streams"] for sample in samples], where="post", color=COLOURS[0])
        load.plot(times, [sample["waiting"] for sample in samples], color=COLOURS[5], linewidth=1)
        load.legend(["open streams", "of those, waiting in cells"], fontsize=8)
        load.set_ylabel("requests")
        cells.step(times, [sample["cells"] for sample in samples], where="post", color=COLOURS[4])
        cells.step(times, [sample["ready"] for sample in samples], where="post", color=COLOURS[2])
        cells.legend(["all", "that serve"], fontsize=8)
        cells.set_ylabel("cells")
        cells.set_ylim(0, record["options"]["max_cells"] + 0.5)
        points = _attainment(requests)
        attainment.plot([at for at, _ in points], [share for _, share in points], "o-", color=COLOURS[0])
        attainment.plot(
            times, [sample["predicted_attainment"] for sample in samples], color=COLOURS[1], linewidth=1
        )
        attainment.legend(["measured by the client", "predicted by the cells"], fontsize=8)
        attainment.set_ylabel("attainment")
        attainment.set_ylim(-0.05, 1.05)
        attainment.set_xlabel("seconds")
        figure.savefig(path)


def _attainment(requests: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Share of requests that met their objectives, by the time at which they ended."""
    windows: dict[int, list[bool]] = {}
    for request in requests:
        windows.setdefault(int(request["ended_s"] // _WINDOW_S), []).append(request["attained"])
    return [
        ((window + 0.5) * _WINDOW_S, sum(attained) / len(attained))
        for window, attained in sorted(windows.items())
    ]
