"""What cells report, as one array for all: the numbers of `cluster.cell_stats` by column."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deployments.cell_router import CellLoad

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Columns of a report.
NAMES = (
    "running",
    "waiting",
    "max_running",
    "kv_slots",
    "kv_use",
    "queue_s",
    "prefill_s_per_token",
    "step_s",
    "tpot_s",
    "idle_tpot_s",
    "attainment",
    "objectives",
    "objective_tpot_s",
    "tokens_per_s",
)
COLUMN = {name: index for index, name in enumerate(NAMES)}


def row(stats: dict[str, float]) -> list[float]:
    """One cell's numbers in the order of the columns."""
    return [stats[name] for name in NAMES]


def as_stats(reports: Floats) -> list[dict[str, float]]:
    """Reports as `deployments.scaling_rules` takes them, one per row."""
    return [dict(zip(NAMES, values, strict=True)) for values in reports.tolist()]


def as_load(cell: int, report: Floats, num_sent: int, sent_tokens: int) -> CellLoad:
    """A report as the router takes it; as of `CellLoad.of`."""
    per_token_s = float(report[COLUMN["prefill_s_per_token"]])
    queue_s = float(report[COLUMN["queue_s"]]) + sent_tokens * per_token_s
    return CellLoad(
        cell=str(cell),
        requests=float(report[COLUMN["running"]] + report[COLUMN["waiting"]]) + num_sent,
        # No fleet has a background.
        queue_s=queue_s,
        background_queue_s=queue_s,
        prefill_s_per_token=per_token_s,
        step_s=float(report[COLUMN["step_s"]]),
        tpot_s=float(report[COLUMN["tpot_s"]]),
        kv_slots=float(report[COLUMN["kv_slots"]]),
    )
