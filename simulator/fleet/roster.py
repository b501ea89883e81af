"""Which cells there are: they are asked for, serve after a while, drain or are lost; and what they cost."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from simulator.fleet.scenario import Scenario

Ints = NDArray[np.int64]

_ROSTER = 41


class Stage(IntEnum):
    """Of a place on the roster."""

    FREE = 0
    STARTING = 1
    READY = 2
    DRAINING = 3


@dataclass(slots=True)
class Changes:
    """What happened to cells at one time; places on the roster.

    Attributes:
        opened: they serve from now on.
        draining: they take no more requests.
        closed: their time to drain is over.
        lost: they died, with what they had.
    """

    opened: list[int] = field(default_factory=list)
    draining: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


class Roster:
    """The cells of a scenario, by place.

    A cell is paid for from when it is asked for until it has drained or is lost. Removed first are those that
    start, then those that came last. For one lost, another is asked for at once. Cells that drain keep their
    places: where none is left, a cell that is wanted is asked for as soon as one is.

    Args:
        scenario: start-up times, losses, limits.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = np.random.default_rng((scenario.seed, _ROSTER))
        self.num_places = 2 * scenario.cells.max
        self.stage = np.full(self.num_places, Stage.FREE)
        self.target = scenario.num_initial
        self._since = np.zeros(self.num_places)
        self._until = np.full(self.num_places, np.inf)
        self._order = np.zeros(self.num_places, np.int64)
        self._num_asked = 0
        self._free = list(range(self.num_places))
        self._paid_s = 0.0
        self.num_lost = 0
        for _ in range(self.target):
            self._ask(0.0, 0.0)

    @property
    def ready(self) -> Ints:
        """Places of the cells that take requests."""
        return np.flatnonzero(self.stage == Stage.READY)

    def count(self, stage: Stage) -> int:
        """Cells in a stage."""
        return int((self.stage == stage).sum())

    def cell_hours(self, now: float) -> float:
        """Paid for until now."""
        held = self.stage != Stage.FREE
        return (self._paid_s + float((now - self._since[held]).sum())) / 3600.0

    def want(self, number: int, now: float, changes: Changes) -> None:
        """So many cells are wanted, starting ones included."""
        self.target = number
        self._ask_for_missing(now)
        there = self._there()
        if number < len(there):
            last_first = np.lexsort((-self._order[there], self.stage[there]))
            for place in there[last_first[: len(there) - number]].tolist():
                if self.stage[place] == Stage.STARTING:
                    self._leave(place, now)
                else:
                    self.stage[place] = Stage.DRAINING
                    self._until[place] = now + self._scenario.cells.drain_timeout_s
                    changes.draining.append(place)

    def advance(self, now: float, seconds: float, is_empty: NDArray[np.bool_]) -> Changes:
        """What comes due by now.

        Args:
            now: seconds.
            seconds: since the last time.
            is_empty: by place, whether the cell has no requests: one that drains may then leave.
        """
        changes = Changes()
        due = self._until <= now
        changes.opened = np.flatnonzero((self.stage == Stage.STARTING) & due).tolist()
        changes.closed = np.flatnonzero((self.stage == Stage.DRAINING) & (due | is_empty)).tolist()
        self.stage[changes.opened] = Stage.READY
        self._until[changes.opened] = np.inf
        for place in changes.closed:
            self._leave(place, now)
        hours = self._scenario.mean_hours_between_losses
        if hours is not None:
            ready = self.ready
            changes.lost = ready[self._rng.random(len(ready)) < seconds / (3600.0 * hours)].tolist()
            for place in changes.lost:
                self._leave(place, now)
                self._ask(now, self._start_up_s())
            self.num_lost += len(changes.lost)
        self._ask_for_missing(now)
        return changes

    def _there(self) -> Ints:
        """Places of the cells that start or serve."""
        return np.flatnonzero((self.stage == Stage.STARTING) | (self.stage == Stage.READY))

    def _ask_for_missing(self, now: float) -> None:
        for _ in range(min(self.target - len(self._there()), len(self._free))):
            self._ask(now, self._start_up_s())

    def _start_up_s(self) -> float:
        spread = self._scenario.start_up_spread
        return self._scenario.start_up_s * float(np.exp(spread * self._rng.standard_normal()))

    def _ask(self, now: float, start_up_s: float) -> None:
        place = heapq.heappop(self._free)
        self._num_asked += 1
        self.stage[place], self._since[place] = Stage.STARTING, now
        self._until[place], self._order[place] = now + start_up_s, self._num_asked

    def _leave(self, place: int, now: float) -> None:
        self._paid_s += now - float(self._since[place])
        self.stage[place], self._until[place] = Stage.FREE, np.inf
        heapq.heappush(self._free, place)
