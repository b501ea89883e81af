"""Plot of `flotilla bench kills`: throughput and attainment over time, with the kills."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.plot_style import COLOURS, STYLE

_WINDOW_S = 10.0
_COLOUR_OF = {
    "drafter": COLOURS[1],
    "verifier": COLOURS[2],
    "scheduler": COLOURS[5],
    "front_end": COLOURS[3],
}


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Two panels over the same time; zero is the first kill."""
    origin = record["kills"][0]["at_s"] if record["kills"] else record["killed_from_s"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 5.0))
        throughput, attainment = figure.subplots(2, 1, sharex=True)
        points = record["tokens_per_s"]
        times = [at + 0.5 - origin for at, _ in points]
        throughput.plot(times, [rate for _, rate in points], color=COLOURS[0], linewidth=1)
        throughput.axhline(record["usual_tokens_per_s"], color=COLOURS[7], linewidth=1, linestyle="--")
        throughput.set_ylabel("tokens per second")
        throughput.set_ylim(bottom=0)
        windows: dict[int, list[bool]] = {}
        for _, ended_s, _, attained in record["requests"]:
            windows.setdefault(int((ended_s - origin) // _WINDOW_S), []).append(attained)
        shares = [((w + 0.5) * _WINDOW_S, sum(of) / len(of)) for w, of in sorted(windows.items())]
        attainment.plot([at for at, _ in shares], [share for _, share in shares], ".-", color=COLOURS[0])
        attainment.set_ylabel("attainment")
        attainment.set_ylim(-0.05, 1.05)
        attainment.set_xlabel("seconds from the first kill")
        for role, colour in _COLOUR_OF.items():
            for number, kill in enumerate(one for one in record["kills"] if one["role"] == role):
                for panel in (throughput, attainment):
                    label = role.replace("_", " ") if number == 0 and panel is throughput else None
                    panel.axvline(kill["at_s"] - origin, color=colour, linewidth=1, alpha=0.7, label=label)
        if record["kills"]:
            throughput.legend(fontsize=8, ncols=4, title="killed", title_fontsize=8)
        figure.savefig(path)
