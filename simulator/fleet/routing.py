"""Routers of a fleet: the one that serves, itself and for many requests at once, and two that know less."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.stream_messages import Objective
from deployments.cell_router import CellRouter
from simulator.fleet.arrivals import Arrivals, Requests
from simulator.fleet.reports import COLUMN, as_load
from simulator.run import submission

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: As `deployments.cell_connection`: a report counts what was sent this long before it.
SENT_S = 0.5
#: As `deployments.cell_router`: misses that differ by less are the same.
_ALIKE_MISS = 0.01
_DRAWS = 31


class Router(Protocol):
    """Chooses a cell for each request of an interval."""

    def route(self, requests: Requests, cells: Ints, reports: Floats, now: float) -> Ints:
        """The cell of each request.

        Args:
            requests: by time of arrival.
            cells: those that take requests; at least one.
            reports: of all cells, by cell.
            now: seconds.
        """


class ServingRouter:
    """`deployments.cell_router.CellRouter`, one per front end, asked request by request.

    Args:
        arrivals: makes requests that can be asked about.
        num_front_ends: each knows only what it sent itself.
    """

    def __init__(self, arrivals: Arrivals, num_front_ends: int) -> None:
        self._arrivals = arrivals
        self._routers = [CellRouter() for _ in range(num_front_ends)]
        self._sent: list[dict[int, deque[tuple[float, int]]]] = [{} for _ in range(num_front_ends)]

    def route(self, requests: Requests, cells: Ints, reports: Floats, now: float) -> Ints:
        """As of `Router`."""
        listed, chosen = cells.tolist(), []
        at = np.maximum(requests.arrived, now)
        for index, one in enumerate(self._arrivals.singly(requests, at)):
            front_end = int(requests.front_end[index])
            router, sent = self._routers[front_end], self._sent[front_end]
            loads = {}
            for cell in listed:
                held = sent.setdefault(cell, deque())
                while held and held[0][0] < one.arrival_s - SENT_S:
                    held.popleft()
                loads[str(cell)] = as_load(cell, reports[cell], len(held), sum(number for _, number in held))
            request = submission(one)
            name = router.choose(request, list(loads.values()))
            router.placed(request, loads[name])
            sent[int(name)].append((one.arrival_s, one.num_prompt))
            chosen.append(int(name))
        return np.array(chosen, dtype=np.int64)


class _Sent:
    """What each front end sent to each cell in the last `SENT_S`: numbers of requests and tokens."""

    def __init__(self, num_front_ends: int, num_cells: int) -> None:
        self._shape = num_front_ends, num_cells
        self._past: deque[tuple[float, Floats, Floats]] = deque()
        self.number = np.zeros(self._shape)
        self.tokens = np.zeros(self._shape)

    def forget(self, now: float) -> None:
        """An interval begins: what is older no longer counts."""
        while self._past and self._past[0][0] < now - SENT_S:
            _, number, tokens = self._past.popleft()
            self.number -= number
            self.tokens -= tokens
        self._past.append((now, np.zeros(self._shape), np.zeros(self._shape)))

    def add(self, front_ends: Ints, cells: Ints, tokens: Ints) -> None:
        """Requests were sent."""
        _, number, past_tokens = self._past[-1]
        np.add.at(number, (front_ends, cells), 1.0)
        np.add.at(past_tokens, (front_ends, cells), tokens.astype(float))
        np.add.at(self.number, (front_ends, cells), 1.0)
        np.add.at(self.tokens, (front_ends, cells), tokens.astype(float))


class ManyRouter:
    """What `CellRouter` chooses, for many requests at once, in rounds.

    In a round a front end's requests do not yet count each other. All requests of a class are judged by
    their mean length; where cells are of one kind, and no first token is predicted to be late, length does
    not matter to the choice. Draws come from a random number generator where the router hashes
    ids. Prefixes are not remembered.

    Args:
        objectives: by class.
        num_front_ends, num_cells: how many.
        seed: of the draws.
    """

    def __init__(
        self, objectives: Sequence[Objective], num_front_ends: int, num_cells: int, seed: int
    ) -> None:
        self._objectives = objectives
        self._rng = np.random.default_rng((seed, _DRAWS))
        self._sent = _Sent(num_front_ends, num_cells)
        self._num_front_ends = num_front_ends

    def route(self, requests: Requests, cells: Ints, reports: Floats, now: float) -> Ints:
        """As of `Router`."""
        self._sent.forget(now)
        chosen = np.zeros(len(requests), np.int64)
        tokens = requests.prompt + requests.done
        # One request in a round where cells are few, up to one for every 64 cells of many.
        per_round = self._num_front_ends * max(1, len(cells) // 64)
        for start in range(0, len(requests), per_round):
            which = slice(start, start + per_round)
            chosen[which] = self._round(
                requests.kind[which], requests.front_end[which], tokens[which], cells, reports[cells]
            )
            self._sent.add(requests.front_end[which], chosen[which], tokens[which])
        return chosen

    def _round(self, kinds: Ints, front_ends: Ints, tokens: Ints, cells: Ints, reports: Floats) -> Ints:
        counted = reports[:, COLUMN["running"]] + reports[:, COLUMN["waiting"]]
        sent_tokens = self._sent.tokens[:, cells]
        chosen = np.zeros(len(kinds), np.int64)
        for kind in np.unique(kinds).tolist():
            which = np.flatnonzero(kinds == kind)
            length = float(tokens[which].mean())
            asking, row = np.unique(front_ends[which], return_inverse=True)
            alike = alike_cells(self._objectives[kind], length, reports, sent_tokens[asking])
            first, second = self._draw_two(alike, row)
            busy_first = counted[first] + self._sent.number[front_ends[which], cells[first]]
            busy_second = counted[second] + self._sent.number[front_ends[which], cells[second]]
            chosen[which] = cells[np.where(busy_second < busy_first, second, first)]
        return chosen

    def _draw_two(self, alike: Mask, row: Ints) -> tuple[Ints, Ints]:
        """Two different places of each given row that are set; the same twice if only one is."""
        places = np.flatnonzero(alike.ravel()) % alike.shape[1]
        number = alike.sum(axis=1)
        start = np.cumsum(number) - number
        most = number[row]
        first = np.minimum((self._rng.random(len(row)) * most).astype(np.int64), most - 1)
        second = np.minimum(
            (self._rng.random(len(row)) * (most - 1)).astype(np.int64), np.maximum(most - 2, 0)
        )
        second = np.where(most > 1, second + (second >= first), first)
        return places[start[row] + first], places[start[row] + second]


def alike_cells(objective: Objective, num_tokens: float, reports: Floats, sent_tokens: Floats) -> Mask:
    """Which cells `CellRouter.choose` draws from.

    Args:
        objective: of the request; none for the last token.
        num_tokens: it has to read.
        reports: of the cells, one per row.
        sent_tokens: that front ends sent to the cells lately, shape (front ends, cells).

    Returns:
        Shape (front ends, cells).
    """
    if objective.e2e_ms is not None:
        raise ValueError("objectives for the last token are not known here")
    per_token_s = reports[:, COLUMN["prefill_s_per_token"]]
    delay_s = (reports[:, COLUMN["queue_s"]] + num_tokens * per_token_s) + sent_tokens * per_token_s
    if objective.ttft_ms is not None or objective.tpot_ms is not None:
        miss = np.zeros_like(delay_s)
        if objective.ttft_ms is not None:
            miss += np.maximum(0.0, 1e3 / objective.ttft_ms * delay_s - 1.0)
        if objective.tpot_ms is not None:
            miss += np.maximum(0.0, 1e3 * reports[:, COLUMN["tpot_s"]] / objective.tpot_ms - 1.0)
        least = miss.min(axis=1, keepdims=True)
        delay_s = np.where(miss <= least + _ALIKE_MISS, delay_s, np.inf)
    best = delay_s.argmin(axis=1)
    bound = delay_s[np.arange(len(best)), best] + reports[best, COLUMN["step_s"]]
    alike: Mask = delay_s <= bound[:, None]
    return alike


class RoundRobin:
    """Every front end asks the cells in turn, from another one on.

    Args:
        num_front_ends: how many.
    """

    def __init__(self, num_front_ends: int) -> None:
        self._next = np.arange(num_front_ends) * 7919

    def route(self, requests: Requests, cells: Ints, reports: Floats, now: float) -> Ints:
        """As of `Router`."""
        chosen = np.zeros(len(requests), np.int64)
        for front_end in np.unique(requests.front_end).tolist():
            which = np.flatnonzero(requests.front_end == front_end)
            chosen[which] = cells[(self._next[front_end] + np.arange(len(which))) % len(cells)]
            self._next[front_end] += len(which)
        return chosen


class TwoChoices:
    """Of two cells drawn, the one with fewer requests: reported, and sent by this front end since.

    Args:
        num_front_ends, num_cells: how many.
        seed: of the draws.
    """

    def __init__(self, num_front_ends: int, num_cells: int, seed: int) -> None:
        self._rng = np.random.default_rng((seed, _DRAWS))
        self._sent = _Sent(num_front_ends, num_cells)
        self._num_front_ends = num_front_ends

    def route(self, requests: Requests, cells: Ints, reports: Floats, now: float) -> Ints:
        """As of `Router`."""
        self._sent.forget(now)
        counted = reports[:, COLUMN["running"]] + reports[:, COLUMN["waiting"]]
        chosen = np.zeros(len(requests), np.int64)
        per_round = self._num_front_ends * max(1, len(cells) // 64)
        for start in range(0, len(requests), per_round):
            which = slice(start, start + per_round)
            front_ends = requests.front_end[which]
            drawn = cells[self._rng.integers(0, len(cells), (2, len(front_ends)))]
            busy = counted[drawn] + self._sent.number[front_ends, drawn]
            chosen[which] = np.where(busy[1] < busy[0], drawn[1], drawn[0])
            self._sent.add(front_ends, chosen[which], requests.prompt[which] + requests.done[which])
        return chosen
