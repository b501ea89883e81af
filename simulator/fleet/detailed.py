"""Cells of a fleet with the scheduler that serves in each, in one process or several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.own_classes import OwnClassError
from simulator.fleet.arrivals import Arrivals, Requests
from simulator.fleet.cells import Ended, Group, Taken, Told
from simulator.fleet.reports import NAMES
from simulator.hardware import HardwareProfile
from simulator.systems import System
from simulator.workloads import SimRequest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class DetailedCells:
    """As of `simulator.fleet.cells.Cells`, each a `simulator.run.Cell`.

    Between two reports cells do not depend on each other, so that groups of them go on in processes of their
    own and meet at every report; the result does not depend on the number of processes.

    Args:
        profile: of every cell.
        system: as the scheduler is configured.
        arrivals: makes what is submitted.
        num_places: cells at most.
        seed: of all.
        processes: to share the cells.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        system: System,
        arrivals: Arrivals,
        num_places: int,
        seed: int,
        processes: int = 1,
    ) -> None:
        self._arrivals, self._num_places = arrivals, num_places
        self._held: dict[str, Requests] = {}
        self._reports = np.zeros((num_places, len(NAMES)))
        self._empty = np.ones(num_places, np.bool_)
        self._submitted: list[list[tuple[int, SimRequest]]] = [[] for _ in range(processes)]
        self._group = Group(profile, system, seed) if processes == 1 else None
        self._pipes: list[Connection] = []
        self._workers: list[Any] = []
        context = multiprocessing.get_context("spawn")
        for _ in range(processes if processes > 1 else 0):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, profile, system, seed), daemon=True)
            worker.start()
            self._pipes.append(ours)
            self._workers.append(worker)

    def open(self, places: Sequence[int], now: float) -> None:
        """As of `Cells`."""
        self._ask("open", places, now)

    def drain(self, places: Sequence[int]) -> Requests:
        """As of `Cells`."""
        return self._back(self._ask("drain", places))

    def close(self, places: Sequence[int]) -> Requests:
        """As of `Cells`."""
        self._reports[places] = 0.0
        self._empty[places] = True
        return self._back(self._ask("close", places))

    def submit(self, requests: Requests, places: Ints, now: float) -> None:
        """As of `Cells`."""
        at = np.maximum(requests.arrived, now)
        numbers = range(len(requests))
        for index, place, one in zip(
            numbers, places.tolist(), self._arrivals.singly(requests, at), strict=True
        ):
            self._held[one.request_id] = requests.take(np.array([index]))
            self._submitted[place % len(self._submitted)].append((place, one))

    def advance(self, until: float) -> tuple[Ended, Requests]:
        """As of `Cells`."""
        calls = [("advance", (submitted, until)) for submitted in self._submitted]
        ended: list[tuple[str, float, float]] = []
        refused: list[Requests] = []
        for told in self._call(calls):
            assert isinstance(told, Told)
            ended += told.ended
            refused += [self._held.pop(request_id) for request_id in told.refused]
            for place, report in told.reports.items():
                self._reports[place] = report
                self._empty[place] = False
            self._empty[told.empty] = True
        for submitted in self._submitted:
            submitted.clear()
        # In an order that does not depend on which process told it.
        ended.sort(key=lambda one: (one[2], one[0]))
        whole = Requests.join(Requests.none(), *(self._held.pop(request_id) for request_id, _, _ in ended))
        first_at = np.array([first for _, first, _ in ended])
        first_at = np.where(np.isnan(whole.first_at), first_at, whole.first_at)
        ended_at = np.array([at for _, _, at in ended])
        back = Requests.join(Requests.none(), *refused)
        return (
            Ended(whole.kind, whole.arrived, first_at, ended_at, whole.output),
            back.take(np.argsort(back.number)),
        )

    def reports(self, *, with_objectives: bool) -> Floats:
        """As of `Cells`."""
        return self._reports.copy()

    def is_empty(self) -> NDArray[np.bool_]:
        """As of `Cells`."""
        return self._empty

    def stop(self) -> None:
        """As of `Cells`."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join()

    def _back(self, answers: list[Any]) -> Requests:
        """Requests as they are after what they got on the cells that they were taken from."""
        taken: Taken = sorted(one for answer in answers for one in answer)
        back = []
        for request_id, num_tokens, first_at in taken:
            held = self._held.pop(request_id)
            held.done[0] += num_tokens
            if first_at is not None and np.isnan(held.first_at[0]):
                held.first_at[0] = first_at
            back.append(held)
        return Requests.join(Requests.none(), *back)

    def _ask(self, name: str, places: Sequence[int], *rest: float) -> list[Any]:
        shares = len(self._submitted)
        calls = [
            (name, ([place for place in places if place % shares == one], *rest)) for one in range(shares)
        ]
        return self._call(calls) if places else []

    def _call(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """One call for every process."""
        if self._group is not None:
            return [getattr(self._group, name)(*arguments) for name, arguments in calls]
        for pipe, call in zip(self._pipes, calls, strict=True):
            pipe.send(call)
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, OwnClassError):
                raise answer
        return answers


def _serve(pipe: Connection, profile: HardwareProfile, system: System, seed: int) -> None:
    """A process with a group of cells, until its pipe is closed."""
    group = Group(profile, system, seed)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(group, name)(*arguments)
        except OwnClassError as error:  # a policy of the user's: who asked is told, and ends
            answer = error
        pipe.send(answer)
