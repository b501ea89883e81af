"""A scenario from beginning to end: cells come and go, requests are routed, cells go on, and again."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulator import hardware
from simulator.fleet.arrivals import Arrivals, Requests
from simulator.fleet.cells import Cells, cell_system
from simulator.fleet.detailed import DetailedCells
from simulator.fleet.ledger import ALL, ClassResult, Ledger
from simulator.fleet.reports import COLUMN
from simulator.fleet.roster import Changes, Roster, Stage
from simulator.fleet.routing import ManyRouter, RoundRobin, Router, ServingRouter, TwoChoices
from simulator.fleet.scaling import Decision, Look, make_scaling
from simulator.fleet.scenario import Scenario
from simulator.fleet.surface import Surface, scenario_arrivals
from simulator.fleet.surface_cells import SurfaceCells

#: A request is refused for good after so many full queues; a front end asks every cell.
_MOST_TRIES = 3
#: Once nothing arrives any more, cells have so long to end what they have.
_AFTERMATH_S = 120.0
#: Parts of time in a report.
_NUM_BINS = 120


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Means over a part of time.

    Attributes:
        at_s: its beginning.
        rate: requests per second.
        attainment: of those that came, by class and under `all`; None where none came.
        refused: requests.
        wanted, serving, starting, draining: cells.
        running, waiting: requests per cell that serves.
        queue_ms: predicted for one more.
    """

    at_s: float
    rate: float
    attainment: dict[str, float | None]
    refused: int
    wanted: float
    serving: float
    starting: float
    draining: float
    running: float
    waiting: float
    queue_ms: float


class FleetResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a scenario.

    Attributes:
        scenario, router, scaling: its name, who routed and who scaled.
        is_detailed: whether every cell had the scheduler that serves.
        classes: by class, and under `all`.
        gpu_hours: paid for during arrivals.
        attained_per_gpu_hour: requests that met their objectives.
        most_cells, mean_cells: that served.
        num_moved: requests that a cell gave back or lost. num_lost: cells.
        decisions: of scaling.
        moments: over time.
        wall_s: that the run took; 0 in what is compared.
    """

    scenario: str
    router: str
    scaling: str
    is_detailed: bool
    classes: dict[str, ClassResult]
    gpu_hours: float
    attained_per_gpu_hour: float
    most_cells: int
    mean_cells: float
    num_moved: int
    num_lost: int
    decisions: list[Decision]
    moments: list[Moment]
    wall_s: float

    @property
    def all(self) -> ClassResult:
        """All classes together."""
        return self.classes[ALL]


def check(scenario: Scenario) -> None:
    """See that what a scenario names is there, before a cell is measured for minutes.

    Raises:
        ValueError: for a profile, a system or a class of requests that is not there, or a trace that is none.
        OSError: if the trace cannot be read.
    """
    arrivals = scenario_arrivals(scenario)
    hardware.load(scenario.profile).check(arrivals.kinds)
    cell_system(scenario.system, scenario.max_running, scenario.max_waiting)
    arrivals.rate(0.0)


def run_detailed(
    scenario: Scenario, processes: int = 1, progress: Callable[[float], None] | None = None
) -> FleetResult:
    """Run a scenario with the scheduler that serves in every cell, and the router that serves.

    Args:
        scenario: some tens of cells at most.
        processes: to share the cells.
        progress: told of the simulated time.
    """
    arrivals, num_places = scenario_arrivals(scenario), 2 * scenario.cells.max
    system = cell_system(scenario.system, scenario.max_running, scenario.max_waiting)
    profile = hardware.load(scenario.profile)
    cells = DetailedCells(profile, system, arrivals, num_places, scenario.seed, processes)
    try:
        router = _router(scenario, arrivals, num_places, one_by_one=True)
        return _Run(scenario, arrivals, cells, router, is_detailed=True).run(progress)
    finally:
        cells.stop()


def run_large(
    scenario: Scenario, surface: Surface, progress: Callable[[float], None] | None = None
) -> FleetResult:
    """Run a scenario of any size with cells that follow a response surface.

    Args:
        scenario: thousands of cells at most.
        surface: measured with the scenario's cells.
        progress: told of the simulated time.
    """
    arrivals, num_places = scenario_arrivals(scenario), 2 * scenario.cells.max
    cells = SurfaceCells(surface, arrivals.objectives, num_places, scenario.max_waiting)
    router = _router(scenario, arrivals, num_places, one_by_one=False)
    return _Run(scenario, arrivals, cells, router, is_detailed=False).run(progress)


def _router(scenario: Scenario, arrivals: Arrivals, num_places: int, *, one_by_one: bool) -> Router:
    if scenario.router == "round-robin":
        return RoundRobin(scenario.front_ends)
    if scenario.router == "two-choices":
        return TwoChoices(scenario.front_ends, num_places, scenario.seed)
    if one_by_one:
        return ServingRouter(arrivals, scenario.front_ends)
    return ManyRouter(arrivals.objectives, scenario.front_ends, num_places, scenario.seed)


class _Run:
    """One run, in intervals between two reports of the cells."""

    def __init__(
        self, scenario: Scenario, arrivals: Arrivals, cells: Cells, router: Router, *, is_detailed: bool
    ) -> None:
        self._scenario, self._arrivals, self._cells, self._router = scenario, arrivals, cells, router
        self._is_detailed = is_detailed
        seconds = scenario.arrivals.seconds
        self._ledger = Ledger(arrivals.kinds, arrivals.objectives, seconds, seconds / _NUM_BINS)
        self._roster = Roster(scenario)
        self._scaling, self._look = make_scaling(scenario), Look()
        self._decisions: list[Decision] = []
        self._pending = Requests.none()
        self._num_requests = self._num_moved = self._most_cells = 0
        self._series = np.zeros((_NUM_BINS, 7))
        self._num_series = np.zeros(_NUM_BINS)

    def run(self, progress: Callable[[float], None] | None) -> FleetResult:
        """All of it."""
        began, scenario = perf_counter(), self._scenario
        seconds, step_s = scenario.arrivals.seconds, scenario.report_s
        gpu_hours, looked_at = 0.0, -np.inf
        step = 0
        while True:
            now = step * step_s
            if now >= seconds and not gpu_hours:
                gpu_hours = self._roster.cell_hours(seconds) * scenario.gpus_per_cell
            is_over = now >= seconds and not len(self._pending) and bool(self._cells.is_empty().all())
            if is_over or now >= seconds + _AFTERMATH_S:
                break
            self._change(self._roster.advance(now, step_s, self._cells.is_empty()), now)
            is_look = now - looked_at >= scenario.look_s - 1e-9
            reports = self._cells.reports(with_objectives=is_look)
            if is_look and now < seconds:
                looked_at = now
                self._scale(reports, now)
                if progress is not None:
                    progress(now)
            self._note(reports, now)
            self._route(reports, now)
            ended, refused = self._cells.advance(now + step_s)
            self._ledger.went(ended.kind, ended.arrived, ended.first_at, ended.ended_at, ended.output)
            refused = refused.again()
            for_good = refused.tries >= _MOST_TRIES
            lost = refused.take(for_good)
            self._ledger.was_refused(lost.kind, lost.arrived)
            self._pending = Requests.join(self._pending, refused.take(~for_good))
            step += 1
        return self._result(gpu_hours, perf_counter() - began)

    def _change(self, changes: Changes, now: float) -> None:
        self._cells.open(changes.opened, now)
        back = [self._cells.drain(changes.draining)] if changes.draining else []
        gone = changes.closed + changes.lost
        if gone:
            back.append(self._cells.close(gone))
        if back:
            moved = Requests.join(*back)
            self._num_moved += len(moved)
            self._pending = Requests.join(self._pending, moved)

    def _scale(self, reports: NDArray[np.float64], now: float) -> None:
        roster, ready = self._roster, self._roster.ready
        self._look.add(reports, now)
        if not len(ready):
            return
        number, reason = self._scaling.wanted(self._look.mean(ready), roster.target, now)
        if number != roster.target:
            self._decisions.append(
                Decision(at_s=now, before=roster.target, after=number, serving=len(ready), reason=reason)
            )
            changes = Changes()
            roster.want(number, now, changes)
            self._change(changes, now)

    def _route(self, reports: NDArray[np.float64], now: float) -> None:
        new = self._arrivals.between(now, self._scenario.report_s, self._num_requests)
        self._num_requests += len(new)
        self._ledger.came(new.kind, new.arrived)
        requests, self._pending = Requests.join(self._pending, new), Requests.none()
        ready = self._roster.ready
        if not len(ready):
            self._pending = requests
        elif len(requests):
            self._cells.submit(requests, self._router.route(requests, ready, reports, now), now)

    def _note(self, reports: NDArray[np.float64], now: float) -> None:
        roster, ready = self._roster, self._roster.ready
        self._most_cells = max(self._most_cells, len(ready))
        place = int(now / self._ledger.bin_s)
        if place >= _NUM_BINS:
            return
        held = reports[ready].mean(axis=0) if len(ready) else np.zeros(reports.shape[1])
        self._num_series[place] += 1
        self._series[place] += (
            roster.target,
            len(ready),
            roster.count(Stage.STARTING),
            roster.count(Stage.DRAINING),
            held[COLUMN["running"]],
            held[COLUMN["waiting"]],
            1e3 * held[COLUMN["queue_s"]],
        )

    def _result(self, gpu_hours: float, wall_s: float) -> FleetResult:
        scenario, ledger = self._scenario, self._ledger
        classes = ledger.results()
        attained = classes[ALL].attainment * classes[ALL].num_requests
        series = self._series / np.maximum(1, self._num_series)[:, None]
        return FleetResult(
            scenario=scenario.name,
            router=scenario.router,
            scaling=scenario.scaling,
            is_detailed=self._is_detailed,
            classes=classes,
            gpu_hours=gpu_hours,
            attained_per_gpu_hour=attained / max(gpu_hours, 1e-9),
            most_cells=self._most_cells,
            mean_cells=float(self._series[:, 1].sum() / max(1.0, self._num_series.sum())),
            num_moved=self._num_moved,
            num_lost=self._roster.num_lost,
            decisions=self._decisions,
            moments=[self._moment(index, series[index].tolist()) for index in range(len(series))],
            wall_s=wall_s,
        )

    def _moment(self, index: int, means: list[float]) -> Moment:
        ledger = self._ledger
        arrived, attained = ledger.arrived[index], ledger.attained[index]
        shares: dict[str, float | None] = {
            name: int(attained[kind]) / int(arrived[kind]) if arrived[kind] else None
            for kind, name in enumerate(self._arrivals.kinds)
        }
        number = int(arrived.sum())
        shares[ALL] = int(attained.sum()) / number if number else None
        wanted, serving, starting, draining, running, waiting, queue_ms = means
        return Moment(
            at_s=index * ledger.bin_s,
            rate=number / ledger.bin_s,
            attainment=shares,
            refused=int(ledger.refused[index].sum()),
            wanted=wanted,
            serving=serving,
            starting=starting,
            draining=draining,
            running=running,
            waiting=waiting,
            queue_ms=queue_ms,
        )
