"""Simulated cells that are driven from outside, one interval after the other, alone or in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.cell_stats import CellStats
from cluster.events import Action, CellDraining, Reject, Tick
from cluster.requests import Request
from simulator.fleet.arrivals import Requests
from simulator.fleet.reports import row
from simulator.hardware import HardwareProfile
from simulator.noise import key_of
from simulator.run import TICK_S, Cell, Options
from simulator.systems import Bounds, System, parse
from simulator.workloads import SimRequest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ended:
    """Requests that got their last token, one per place of each array; attributes as of `Requests`."""

    kind: Ints
    arrived: Floats
    first_at: Floats
    ended_at: Floats
    output: Ints


class Cells(Protocol):
    """Cells by place, which requests are submitted to and which then go on for an interval."""

    def open(self, places: Sequence[int], now: float) -> None:
        """Cells serve from now on."""

    def drain(self, places: Sequence[int]) -> Requests:
        """Cells take no more; what waits there is given back."""

    def close(self, places: Sequence[int]) -> Requests:
        """Cells are gone; what they had is given back, with the tokens it got."""

    def submit(self, requests: Requests, places: Ints, now: float) -> None:
        """Requests go to cells, when they arrive or at `now` if they came before."""

    def advance(self, until: float) -> tuple[Ended, Requests]:
        """Go on until then; what ended, and what was refused for a full queue."""

    def reports(self, *, with_objectives: bool) -> Floats:
        """What cells report now, shape (places, columns); zeros where there is none.

        Without objectives, what is predicted of those may be left out.
        """

    def is_empty(self) -> NDArray[np.bool_]:
        """Which places have no request."""

    def stop(self) -> None:
        """Free what they hold."""


def cell_system(name: str, max_running: int, max_waiting: int) -> System:
    """A system by its name, with room for so many requests.

    Raises:
        ValueError: for a name that is none.
    """
    system = parse(name, Bounds(max_running=max_running))
    scheduler = system.config.scheduler.model_copy(update={"max_waiting": max_waiting})
    return System(system.name, system.config.model_copy(update={"scheduler": scheduler}))


@dataclass(slots=True)
class Told:
    """What happened in cells during an interval; requests by id.

    Attributes:
        ended: id, first token and last, in seconds. Of a request that came with tokens, its next token.
        refused: ids.
        reports: by place.
        empty: places without requests.
    """

    ended: list[tuple[str, float, float]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    reports: dict[int, list[float]] = field(default_factory=dict)
    empty: list[int] = field(default_factory=list)


#: Requests taken from a cell: id, tokens they got there, and when the first came.
Taken = list[tuple[str, int, float | None]]


class FleetCell(Cell):
    """A simulated cell that goes on as far as it is told."""

    def __init__(self, profile: HardwareProfile, system: System, options: Options, now: float) -> None:
        super().__init__(profile, system, options)
        self._stats = CellStats()
        self._refused: list[str] = []
        self._ticking = Tick()
        self.clock.at(now + TICK_S, self._ticking)

    def advance(self, until: float) -> None:
        """Let everything happen that is due by then."""
        clock = self.clock
        while clock.due <= until:
            event = self._take_due()
            if event is None:
                continue
            if event is self._ticking:  # others are for calls that are held back
                clock.at(clock.now + TICK_S, event)
            self._handle(event)

    def tell(self, told: Told, now: float, place: int) -> None:
        """Add what happened since the last time, and how it is."""
        for request_id, (at, receipt) in self.receipts.items():
            first_at = at - 1e-3 * (receipt.e2e_ms - (receipt.ttft_ms or 0.0))
            told.ended.append((request_id, first_at, at))
            self._stats.ended(receipt.num_output_tokens)
        self.receipts.clear()
        told.refused += self._refused
        self._refused.clear()
        told.reports[place] = row(self._stats.measure(self.core, now))
        if not self.core.requests:
            told.empty.append(place)

    def drain(self) -> Taken:
        """Take no more; what waited, also who had begun and was preempted."""
        waiting = _taken(self.core.waiting)
        for action in self.core.handle(CellDraining(), self.clock.now):
            # Those that wait are given back.
            if not isinstance(action, Reject):
                super()._act(action)
        return waiting

    def give_up(self) -> Taken:
        """All that it has."""
        return _taken(self.core.requests.values())

    def _act(self, action: Action) -> None:
        if isinstance(action, Reject):
            self._refused.append(action.rejection.request_id)
        super()._act(action)


def _taken(requests: Iterable[Request]) -> Taken:
    return [(request.request_id, len(request.output), request.first_token_at) for request in requests]


class Group:
    """Cells of one process, by place.

    Args:
        profile: of every cell.
        system: as the scheduler is configured.
        seed: of all.
    """

    def __init__(self, profile: HardwareProfile, system: System, seed: int) -> None:
        self._profile, self._system, self._seed = profile, system, seed
        self._cells: dict[int, FleetCell] = {}
        self._num_opened: dict[int, int] = {}

    def open(self, places: Sequence[int], now: float) -> None:
        """Cells serve from now on."""
        for place in places:
            turn = self._num_opened[place] = self._num_opened.get(place, 0) + 1
            options = Options(seed=key_of(self._seed, place, turn) >> 1)
            self._cells[place] = FleetCell(self._profile, self._system, options, now)

    def drain(self, places: Sequence[int]) -> Taken:
        """As of `FleetCell.drain`, of all."""
        return [one for place in places for one in self._cells[place].drain()]

    def close(self, places: Sequence[int]) -> Taken:
        """Cells are gone; what they had."""
        return [one for place in places for one in self._cells.pop(place).give_up()]

    def advance(self, submitted: Sequence[tuple[int, SimRequest]], until: float) -> Told:
        """Take requests, by place, and go on until then."""
        for place, request in submitted:
            self._cells[place].submit(request)
        told = Told()
        for place, cell in sorted(self._cells.items()):
            cell.advance(until)
            cell.tell(told, until, place)
        return told
