"""Plot of `flotilla bench soak`: memory by process and latency by minute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.live_system import OUR_ROLES
from benchmarks.plot_style import COLOURS, STYLE


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Three panels over the same minutes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 6.5))
        memory, use, latency = figure.subplots(3, 1, sharex=True)
        for process in record["samples"]["processes"]:
            if process["role"] not in OUR_ROLES:
                continue
            samples = process["samples"]
            colour = COLOURS[OUR_ROLES.index(process["role"])]
            memory.plot(
                [one["time_s"] / 60.0 for one in samples],
                [one["private_mb"] - samples[0]["private_mb"] for one in samples],
                color=colour,
                linewidth=1,
                label=f"{process['role'].replace('_', ' ')} ({samples[0]['private_mb']:.0f} MB)",
            )
        memory.legend(fontsize=7, ncols=2)
        memory.set_ylabel("MB more than at first")
        system = record["samples"]["system"]
        times = [one["time_s"] / 60.0 for one in system]
        use.plot(times, [one["flotilla_requests_running"] for one in system], color=COLOURS[0], linewidth=1)
        use.plot(times, [one["flotilla_requests_waiting"] for one in system], color=COLOURS[5], linewidth=1)
        use.plot(times, [100.0 * one["kv_use"] for one in system], color=COLOURS[2], linewidth=1)
        use.legend(["running", "waiting", "KV slots in use (%)"], fontsize=7, ncols=3)
        use.set_ylabel("requests, %")
        minutes = [one["minute"] + 0.5 for one in record["minutes"]]
        for name, colour in (("ttft_ms", COLOURS[0]), ("tpot_ms", COLOURS[1])):
            latency.plot(minutes, [one[name]["median"] for one in record["minutes"]], ".-", color=colour)
        latency.set_yscale("log")
        latency.legend(["TTFT, median", "TPOT, median"], fontsize=7, ncols=2)
        latency.set_ylabel("ms")
        latency.set_xlabel("minutes")
        figure.savefig(path)
