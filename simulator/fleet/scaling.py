"""Who says how many cells there are: the rule that serves, Ray Serve's, or nobody; and why it said so."""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from deployments.scaling_rules import LOOK_BACK_S, Memory, desired_cells, overload_parts
from simulator.fleet.reports import COLUMN, as_stats
from simulator.fleet.scenario import Scenario

Floats = NDArray[np.float64]

#: Seconds over which Ray Serve averages ongoing requests by default.
_ONGOING_LOOK_BACK_S = 30.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The number of cells wanted was changed.

    Attributes:
        at_s: when.
        before, after: cells wanted.
        serving: cells that served.
        reason: what of the load brought it about.
    """

    at_s: float
    before: int
    after: int
    serving: int
    reason: str


class Scaling(Protocol):
    """Says how many cells there should be."""

    def wanted(self, reports: Floats, current: int, now: float) -> tuple[int, str]:
        """How many, and why.

        Args:
            reports: of the cells that serve, one per row.
            current: how many are wanted at present.
            now: seconds.
        """


class Fixed:
    """Leaves the number as it is."""

    def wanted(self, reports: Floats, current: int, now: float) -> tuple[int, str]:
        """As of `Scaling`."""
        return current, ""


class ServingRule:
    """`deployments.scaling_rules.desired_cells`, on means over `LOOK_BACK_S` as Ray Serve passes them on."""

    def __init__(self, scenario: Scenario) -> None:
        self._config = scenario.cells
        self._memory = Memory()

    def wanted(self, reports: Floats, current: int, now: float) -> tuple[int, str]:
        """As of `Scaling`."""
        stats = as_stats(reports)
        number, self._memory = desired_cells(stats, current, now, self._config, self._memory)
        if number == current:
            return number, ""
        parts = overload_parts(stats, self._config)
        if number < current:
            return number, f"{number} cells stay below {self._config.low_load:g} of every limit"
        name = max(parts, key=lambda part: parts[part])
        queue_ms = 1e3 * float(reports[:, COLUMN["queue_s"]].mean())
        objectives = reports[:, COLUMN["objectives"]]
        attained = float((objectives * reports[:, COLUMN["attainment"]]).sum()) / max(
            1.0, float(objectives.sum())
        )
        return number, {
            "queue": f"predicted queue {queue_ms:.0f} ms, limit {self._config.target_queue_ms:g} ms",
            "kv": f"KV use {reports[:, COLUMN['kv_use']].mean():.0%}, limit {self._config.kv_high:.0%}",
            "objectives": f"{attained:.1%} predicted to attain, target {self._config.target_attainment:.0%}",
        }[name]


class OngoingRequests:
    """Ray Serve's default: so many cells that each has `target_ongoing` requests.

    A change must have been called for at every look for the rule's delay; then the number jumps to what is
    called for (https://docs.ray.io/en/latest/serve/advanced-guides/advanced-autoscaling.html).
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._past: deque[tuple[float, float]] = deque()
        self._more_since: float | None = None
        self._fewer_since: float | None = None

    def wanted(self, reports: Floats, current: int, now: float) -> tuple[int, str]:
        """As of `Scaling`."""
        cells, target = self._scenario.cells, self._scenario.target_ongoing
        self._past.append((now, float((reports[:, COLUMN["running"]] + reports[:, COLUMN["waiting"]]).sum())))
        while self._past[0][0] < now - _ONGOING_LOOK_BACK_S:
            self._past.popleft()
        ongoing = sum(number for _, number in self._past) / len(self._past)
        number = min(max(math.ceil(ongoing / target), cells.min), cells.max)
        more_s, fewer_s = self._scenario.ongoing_delays_s
        self._more_since = (
            None if number <= current else now if self._more_since is None else self._more_since
        )
        self._fewer_since = (
            None if number >= current else now if self._fewer_since is None else self._fewer_since
        )
        is_due = (self._more_since is not None and now - self._more_since >= more_s) or (
            self._fewer_since is not None and now - self._fewer_since >= fewer_s
        )
        if not is_due:
            return current, ""
        self._more_since = self._fewer_since = None
        return number, f"{ongoing:.0f} requests, {target:g} per cell"


class Look:
    """Means of the reports of every cell over `LOOK_BACK_S`, as Ray Serve's controller has them."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, Floats]] = deque()

    def add(self, reports: Floats, now: float) -> None:
        """Reports of all cells came; rows of zeros are of cells that did not serve yet."""
        self._past.append((now, reports))
        while self._past[0][0] < now - LOOK_BACK_S:
            self._past.popleft()

    def mean(self, cells: NDArray[np.int64]) -> Floats:
        """Of these cells, over the reports since each serves."""
        held = np.stack([reports[cells] for _, reports in self._past])
        # A cell that serves has room for somebody.
        told = (held[:, :, COLUMN["max_running"]] > 0.0)[:, :, None]
        mean: Floats = (held * told).sum(axis=0) / np.maximum(1, told.sum(axis=0))
        return mean


def make_scaling(scenario: Scenario) -> Scaling:
    """The rule that the scenario names."""
    if scenario.scaling == "fixed" or scenario.cells.is_fixed:
        return Fixed()
    return OngoingRequests(scenario) if scenario.scaling == "ongoing" else ServingRule(scenario)
