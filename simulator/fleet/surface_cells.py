"""Thousands of cells at once, each following a response surface; requests are places of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.batching.flotilla import LENGTH_WEIGHT, STEPS_TO_FIRST
from cluster.stream_messages import Objective
from simulator.fleet.arrivals import Requests
from simulator.fleet.cells import Ended
from simulator.fleet.reports import COLUMN, NAMES
from simulator.fleet.surface import NUM_RANKS, Surface

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Seconds over which the share of prompts in a cell's time is smoothed.
_PROMPTS_S = 4.0
_MOST_BUSY = 0.9


class SurfaceCells:
    """As of `simulator.fleet.cells.Cells`.

    A cell reads prompts one after the other, in order of arrival; a request is decoded at the pace of its
    class and rank beside so many others. Requests that find no place wait for one.

    Args:
        surface: of every cell.
        objectives: by class.
        num_places: cells at most.
        max_waiting: requests in a queue before it refuses.
    """

    def __init__(
        self, surface: Surface, objectives: Sequence[Objective], num_places: int, max_waiting: int
    ) -> None:
        self._surface, self._num_places, self._max_waiting = surface, num_places, max_waiting
        self._tpot_s = surface.tpot_s.ravel()
        infinite = float("inf")
        self._ttft_objective_s = np.array([(one.ttft_ms or infinite) / 1e3 for one in objectives])
        self._tpot_objective_s = np.array([(one.tpot_ms or infinite) / 1e3 for one in objectives])
        idle_s = surface.reports[1, COLUMN["idle_tpot_s"]]
        self._feasible = (idle_s <= self._tpot_objective_s) & np.isfinite(
            np.minimum(self._tpot_objective_s, self._ttft_objective_s)
        )
        self._is_open = np.zeros(num_places, np.bool_)
        self._running = np.zeros(num_places, np.int64)
        self._read_at = np.zeros(num_places)
        self._busy = np.zeros(num_places)
        self._now = 0.0
        # Requests that run, one per place of these arrays; `_cell` is -1 where there is none.
        self._held = Requests.none()
        self._cell = np.empty(0, np.int64)
        self._row = np.empty(0, np.int64)
        self._begun = np.empty(0)
        self._left = np.empty(0)
        self._queue, self._queue_cell = Requests.none(), np.empty(0, np.int64)
        self._refused: list[Requests] = []

    def open(self, places: Sequence[int], now: float) -> None:
        """As of `Cells`."""
        self._is_open[places] = True
        self._read_at[places] = now
        self._busy[places] = 0.0

    def drain(self, places: Sequence[int]) -> Requests:
        """As of `Cells`."""
        given = np.isin(self._queue_cell, places)
        back = self._queue.take(given)
        self._queue, self._queue_cell = self._queue.take(~given), self._queue_cell[~given]
        return back

    def close(self, places: Sequence[int]) -> Requests:
        """As of `Cells`."""
        waiting = self.drain(places)
        which = np.isin(self._cell, places)
        held = self._held.take(which)
        got = self._num_done()[which]
        has_first = got > held.done
        held.first_at[:] = np.where(has_first & np.isnan(held.first_at), self._begun[which], held.first_at)
        held.done[:] = got
        self._keep(~which)
        self._running[places] = 0
        self._is_open[places] = False
        return Requests.join(waiting, held)

    def submit(self, requests: Requests, places: Ints, now: float) -> None:
        """As of `Cells`."""
        self._queue = Requests.join(self._queue, requests)
        self._queue_cell = np.concatenate([self._queue_cell, places])
        order = self._queue_order(now)
        cells = self._queue_cell[order]
        rank = np.arange(len(cells)) - np.searchsorted(cells, cells)
        free = self._surface.max_running - self._running[cells]
        admitted = rank < free
        refused = rank - np.maximum(free, 0) >= self._max_waiting
        self._begin(self._queue.take(order[admitted]), cells[admitted], now)
        if refused.any():
            self._refused.append(self._queue.take(order[refused]))
        stay = np.sort(order[~admitted & ~refused])
        self._queue, self._queue_cell = self._queue.take(stay), self._queue_cell[stay]

    def _queue_order(self, now: float) -> Ints:
        """By cell, and there in the order in which places are given; as of `cluster.batching.flotilla`."""
        surface, queue = self._surface, self._queue
        if surface.ageing_s is None or not len(queue):
            return np.argsort(self._queue_cell, kind="stable")
        waited_s = np.maximum(0.0, now - queue.arrived)
        due_s = self._ttft_objective_s[queue.kind] - waited_s
        left_s = (queue.prompt + queue.done) * surface.token_s
        beside = np.minimum(self._running[self._queue_cell], surface.max_running)
        step_s = surface.reports[beside, COLUMN["step_s"]]
        is_late = ~np.isfinite(due_s) | (due_s < left_s + STEPS_TO_FIRST * step_s)
        key = np.where(is_late, surface.ageing_s - waited_s, due_s + LENGTH_WEIGHT * left_s)
        level = -(waited_s // surface.ageing_s)
        return np.lexsort((queue.number, key, level, self._queue_cell))

    def _begin(self, requests: Requests, cells: Ints, now: float) -> None:
        """Requests, by cell, get a place; their prompts are read one after the other."""
        if not len(requests):
            return
        surface = self._surface
        by_time = np.lexsort((np.maximum(requests.arrived, now), cells))
        requests, cells = requests.take(by_time), cells[by_time]
        np.add.at(self._running, cells, 1)
        held = self._running[cells]
        tokens = (requests.prompt + requests.done).astype(float)
        takes_s = tokens * surface.chunk_s[held]
        rest_s = tokens * surface.prefill_s[held] - takes_s + surface.first_s[held]
        comes = np.maximum(requests.arrived, now)
        is_first = np.concatenate([[True], cells[1:] != cells[:-1]])
        # The end of each: the later of its arrival and the end of the one before, and what it takes itself.
        group = np.cumsum(is_first) - 1
        total = np.cumsum(takes_s)
        total -= (total - takes_s)[is_first][group]
        comes = np.where(is_first, np.maximum(comes, self._read_at[cells]), comes)
        # Groups are kept apart by more than any time within one.
        apart = 1e5 * group
        read_at = np.maximum.accumulate(comes - (total - takes_s) + apart) - apart + total
        np.maximum.at(self._read_at, cells, read_at)
        share = tokens * surface.token_s / _PROMPTS_S
        self._busy += np.bincount(cells, weights=share, minlength=self._num_places)
        rank = np.minimum((requests.rank * NUM_RANKS).astype(np.int64), NUM_RANKS - 1)
        self._held = Requests.join(self._held, requests)
        self._cell = np.concatenate([self._cell, cells])
        self._row = np.concatenate([self._row, requests.kind * (surface.max_running + 1) * NUM_RANKS + rank])
        self._begun = np.concatenate([self._begun, read_at + rest_s])
        left = np.maximum(0, requests.output - requests.done - 1)
        self._left = np.concatenate([self._left, left.astype(float)])

    def advance(self, until: float) -> tuple[Ended, Requests]:
        """As of `Cells`."""
        if len(self._queue):
            self.submit(Requests.none(), np.empty(0, np.int64), self._now)
        surface, seconds = self._surface, until - self._now
        beside = np.minimum(self._running, surface.max_running)
        # Prompts take more or less of the time than where the surface was measured.
        slower = (1.0 - surface.busy[beside]) / (1.0 - np.minimum(self._busy, _MOST_BUSY))
        tpot_s = self._tpot_s[self._row + beside[self._cell] * NUM_RANKS] * slower[self._cell]
        active = np.clip(until - self._begun, 0.0, seconds)
        self._left -= active / tpot_s
        self._busy *= np.exp(-seconds / _PROMPTS_S)
        self._now = until
        done = (self._left <= 0.0) & (self._begun <= until)
        gone = np.flatnonzero(done)
        ended = self._held.take(gone)
        first_at = np.where(np.isnan(ended.first_at), self._begun[gone], ended.first_at)
        ended_at = until + self._left[gone] * tpot_s[gone]
        self._running -= np.bincount(self._cell[gone], minlength=self._num_places)
        self._keep(~done)
        refused, self._refused = Requests.join(Requests.none(), *self._refused), []
        return Ended(
            ended.kind, ended.arrived, first_at, np.maximum(ended_at, first_at), ended.output
        ), refused

    def reports(self, *, with_objectives: bool) -> Floats:
        """As of `Cells`."""
        surface = self._surface
        reports = np.zeros((self._num_places, len(NAMES)))
        running = self._running
        beside = np.minimum(running, surface.max_running)
        reports[:] = surface.reports[beside]
        waiting = np.bincount(self._queue_cell, minlength=self._num_places)
        per_token_s = surface.reports[1, COLUMN["prefill_s_per_token"]]
        tokens = (self._held.prompt + self._num_done()).astype(float)
        used = np.bincount(self._cell, weights=tokens, minlength=self._num_places)
        reports[:, COLUMN["running"]] = running
        reports[:, COLUMN["waiting"]] = waiting
        reports[:, COLUMN["max_running"]] = surface.max_running
        reports[:, COLUMN["kv_use"]] = used / surface.reports[1, COLUMN["kv_slots"]]
        reports[:, COLUMN["queue_s"]] = self._queue_s(reports, waiting, per_token_s)
        if with_objectives:
            self._judge(reports, waiting, per_token_s)
        reports[~self._is_open] = 0.0
        return reports

    def is_empty(self) -> NDArray[np.bool_]:
        """As of `Cells`."""
        waiting = np.bincount(self._queue_cell, minlength=self._num_places)
        empty: NDArray[np.bool_] = (self._running == 0) & (waiting == 0)
        return empty

    def stop(self) -> None:
        """As of `Cells`."""

    def _num_done(self) -> Ints:
        """Tokens that each running request has got, those of its earlier lives included."""
        left = np.ceil(np.maximum(self._left, 0.0)).astype(np.int64)
        return np.where(self._begun <= self._now, self._held.output - left, self._held.done)

    def _keep(self, which: NDArray[np.bool_]) -> None:
        self._held = self._held.take(which)
        self._cell, self._row = self._cell[which], self._row[which]
        self._begun, self._left = self._begun[which], self._left[which]

    # As `cluster.cell_stats` predicts them

    def _expected_left(self) -> Floats:
        done = self._num_done()
        mean = self._surface.mean_output
        expected = np.minimum(np.maximum(mean - done, mean / 4), self._held.output - done)
        at_least_one: Floats = np.maximum(1.0, expected)
        return at_least_one

    def _queue_s(self, reports: Floats, waiting: Ints, per_token_s: float) -> Floats:
        """Until a request that came now began its prefill."""
        unread = (
            np.maximum(0.0, self._read_at - self._now)
            / self._surface.chunk_s[np.minimum(self._running, self._surface.max_running)]
        )
        if len(self._queue):
            tokens = (self._queue.prompt + self._queue.done).astype(float)
            unread = unread + np.bincount(self._queue_cell, weights=tokens, minlength=self._num_places)
        reading_s = np.asarray(unread * per_token_s, np.float64)
        too_many = self._running + waiting + 1 - self._surface.max_running
        if not (too_many > 0).any():
            return reading_s
        lengths = self._num_done() + self._expected_left()
        tokens = np.bincount(self._cell, weights=lengths, minlength=self._num_places)
        running = np.maximum(1, self._running)
        place_s = too_many * (tokens / running) * reports[:, COLUMN["tpot_s"]] / running
        is_full = (too_many > 0) & (self._running > 0)
        queue_s: Floats = np.where(is_full, np.maximum(reading_s, place_s), reading_s)
        return queue_s

    def _judge(self, reports: Floats, waiting: Ints, per_token_s: float) -> None:
        """How many have objectives, and the share predicted to attain them."""
        held, now, places = self._held, self._now, self._num_places
        cell_tpot_s = reports[:, COLUMN["tpot_s"]][self._cell]
        done = self._num_done()
        has_first = ~np.isnan(held.first_at) | (self._begun <= now)
        first_at = np.where(np.isnan(held.first_at), self._begun, held.first_at)
        given = np.maximum(1, done - 1)
        so_far_s = (now - first_at) / given
        left = self._expected_left()
        final_s = np.where(
            has_first & (done > 1), (so_far_s * given + cell_tpot_s * left) / (given + left), cell_tpot_s
        )
        meets = (final_s <= self._tpot_objective_s[held.kind]) & (
            first_at - held.arrived <= self._ttft_objective_s[held.kind]
        )
        judged = self._feasible[held.kind]
        objectives = np.bincount(self._cell, weights=judged, minlength=places)
        attained = np.bincount(self._cell, weights=judged & meets, minlength=places)
        tpots = np.where(np.isfinite(self._tpot_objective_s), self._tpot_objective_s, 0.0)
        wanted = np.bincount(self._cell, weights=judged * tpots[held.kind], minlength=places)
        if len(self._queue):
            cells, kinds = self._queue_cell, self._queue.kind
            order = np.argsort(cells, kind="stable")
            place = np.empty(len(cells))
            place[order] = np.arange(len(cells)) - np.searchsorted(cells[order], cells[order]) + 1.0
            ttft_s = now - self._queue.arrived
            ttft_s += place / waiting[cells] * reports[cells, COLUMN["queue_s"]]
            ttft_s += (self._queue.prompt + self._queue.done) * per_token_s
            meets = (ttft_s <= self._ttft_objective_s[kinds]) & (
                reports[cells, COLUMN["tpot_s"]] <= self._tpot_objective_s[kinds]
            )
            judged = self._feasible[kinds]
            # Not in place: where nobody runs, what is counted above are whole numbers.
            objectives = objectives + np.bincount(cells, weights=judged, minlength=places)
            attained = attained + np.bincount(cells, weights=judged & meets, minlength=places)
            wanted = wanted + np.bincount(cells, weights=judged * tpots[kinds], minlength=places)
        some = np.maximum(1.0, objectives)
        reports[:, COLUMN["objectives"]] = objectives
        reports[:, COLUMN["attainment"]] = np.where(objectives > 0, attained / some, 1.0)
        reports[:, COLUMN["objective_tpot_s"]] = wanted / some
