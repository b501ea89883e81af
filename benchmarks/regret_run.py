"""Run a selector through a bandit, slot by slot, and count what it loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.regret_bandit import LAYER_S, MAX_DEPTH, VERIFY_S, WINDOW_TOKENS, Bandit, BanditCosts, Float64
from selector.protocol import DrafterView, Explores, Outcome, PoolView, RequestView, Selector

BLOCK = 2048
# In the beginning every request is asked about at each of these slots, later one after the other.
ASK_SLOTS = 4
ASK_ALL_SLOTS = 1024


@dataclass
class Losses:
    """Tokens lost in each slot (float64 [slots]).

    Attributes:
        goodput: expected tokens the best matching brings more (SPIN eq. 6, first part).
        switching: tokens not decoded while caches are computed, at lambda 1 (second part).
        reading: tokens the requests of a drafter would lose if it read others' tokens instead of drafting.
        num_switches: of all requests.
        read_s: seconds drafters read to be scored, all of it while they were idle.
        idle_s: seconds drafters were idle.
    """

    goodput: Float64
    switching: Float64
    reading: Float64
    num_switches: int = 0
    read_s: float = 0.0
    idle_s: float = 0.0


@dataclass
class _Reading:
    """A drafter reads a request in what time its drafts leave it."""

    drafter: int
    request: int
    left_s: float


class Simulation:
    """One selector on one instance, which may become another halfway."""

    def __init__(
        self,
        selector: Selector,
        phases: Sequence[Bandit],
        num_slots: int,
        seed: int,
        *,
        is_static: bool = False,
    ) -> None:
        """Prepare `num_slots` slots, equally many of each phase; the noise is the same for one seed.

        `is_static` says that the selector never moves a request that may stay, which saves the time to ask.
        """
        self.selector, self.phases, self.num_slots = selector, phases, num_slots
        self._is_static = is_static
        self._noise = np.random.default_rng((seed, 1))
        self._scores = np.random.default_rng((seed, 2))
        num_requests, num_drafters = phases[0].rates.shape
        self.ids = [f"r{i}" for i in range(num_requests)]
        self.names = [f"d{j}" for j in range(num_drafters)]
        self.place = [-1] * num_requests
        self.output = [0] * num_requests
        self.scored_at = [[0] * num_drafters for _ in self.ids]
        self.losses = Losses(np.zeros(num_slots), np.zeros(num_slots), np.zeros(num_slots))
        self._reading: list[_Reading] = []
        self._costs = BanditCosts()
        self._busy_s = [0.0] * num_drafters
        for i, name in enumerate(self.ids):
            selector.begin(name, [i] * phases[0].num_prompt[i])

    def run(self) -> Losses:
        """All slots."""
        per_phase = self.num_slots // len(self.phases)
        for number, bandit in enumerate(self.phases):
            start = number * per_phase
            end = self.num_slots if bandit is self.phases[-1] else start + per_phase
            self._run_phase(bandit, start, end)
        return self.losses

    def _run_phase(self, bandit: Bandit, start: int, end: int) -> None:
        goodput, depth, step_s = bandit.goodput.tolist(), bandit.depth.tolist(), bandit.step_s.tolist()
        explores = self.selector if isinstance(self.selector, Explores) else None
        pool = self._settle(bandit, depth, step_s)
        loss = self._loss(bandit, goodput)
        for begin in range(start, end, BLOCK):
            uniform = self._noise.random((min(BLOCK, end - begin), *bandit.rates.shape))
            for slot, accepted in enumerate(bandit.accepted(uniform).tolist(), begin):
                views = self._views(bandit, slot)
                chosen = self.selector.assign(views, pool)
                if any(chosen[view.request_id] != view.current for view in views):
                    self._move(views, chosen, goodput, slot)
                    pool = self._settle(bandit, depth, step_s)
                    loss = self._loss(bandit, goodput)
                self.losses.goodput[slot] = loss
                self._decode(accepted, depth, step_s)
                if explores is not None:
                    if slot % ASK_SLOTS == 0:
                        self._ask(explores, bandit, pool, slot, goodput)
                    self._read(bandit)
            if self._is_static:
                self.losses.goodput[begin:end] = loss
                return

    def _views(self, bandit: Bandit, slot: int) -> list[RequestView]:
        names, allowed, place, output = self.names, tuple(self.names), self.place, self.output
        return [
            RequestView(
                name,
                names[place[i]] if place[i] >= 0 else "",
                allowed,
                bandit.num_prompt[i],
                bandit.num_prompt[i] + output[i],
                1 << 30,
                slot,
            )
            for i, name in enumerate(self.ids)
        ]

    def _move(
        self, views: list[RequestView], chosen: dict[str, str], goodput: list[list[float]], slot: int
    ) -> None:
        for i, view in enumerate(views):
            name = chosen[view.request_id]
            before, after = self.place[i], int(name[1:]) if name else -1
            if after == before:
                continue
            self.place[i] = after
            if before >= 0:
                self.scored_at[i][before] = self.output[i]
            if after >= 0 and slot:
                self.losses.num_switches += 1
                read_s = self._costs.rebuild_s(name, view.num_context)
                self.losses.switching[slot] += read_s * goodput[i][after]
        counts = np.bincount([j for j in self.place if j >= 0], minlength=len(self.names))
        if np.any(counts > self.phases[0].capacities):
            raise RuntimeError(f"a selector put {counts.tolist()} requests on drafters that take fewer")

    def _settle(self, bandit: Bandit, depth: list[list[int]], step_s: list[list[float]]) -> PoolView:
        """The pool as it is loaded now; each drafter drafts for its requests as a batch."""
        loads = [0] * len(self.names)
        self._busy_s = [0.0] * len(self.names)
        for i, j in enumerate(self.place):
            if j >= 0:
                loads[j] += 1
                self._busy_s[j] = max(self._busy_s[j], depth[i][j] * LAYER_S[j])
        capacities = bandit.capacities.tolist()
        views = {
            name: DrafterView(name, name, capacities[j], loads[j], j + 1) for j, name in enumerate(self.names)
        }
        return PoolView(views, self._costs, MAX_DEPTH)

    def _loss(self, bandit: Bandit, goodput: list[list[float]]) -> float:
        """Expected tokens a slot of the present places falls short of the best matching."""
        now = sum(goodput[i][j] if j >= 0 else bandit.none for i, j in enumerate(self.place))
        return (bandit.optimum - now) * bandit.slot_s

    def _decode(self, accepted: list[list[int]], depth: list[list[int]], step_s: list[list[float]]) -> None:
        outcomes = []
        for i, j in enumerate(self.place):
            if j < 0:
                self.output[i] += 1
                continue
            name, agreed, most = self.ids[i], accepted[i][j], depth[i][j]
            self.output[i] += agreed + 1
            outcomes.append(Outcome(name, self.names[j], agreed + 1, most, step_s[i][j]))
            # Each drafted token up to the first rejected one has been judged.
            self.selector.score(name, self.names[j], min(agreed + 1, most), agreed)
        self.selector.observe(outcomes)

    def _ask(
        self, explores: Explores, bandit: Bandit, pool: PoolView, slot: int, goodput: list[list[float]]
    ) -> None:
        """Have drafters that read nothing begin to read what the selector wants them scored on."""
        views = self._views(bandit, slot)
        if slot >= ASK_ALL_SLOTS:
            views = [views[slot // ASK_SLOTS % len(views)]]
        for view in views:
            reading = {self.names[one.drafter] for one in self._reading}
            idle = {name: drafter for name, drafter in pool.drafters.items() if name not in reading}
            name = explores.explore(view, PoolView(idle, self._costs, MAX_DEPTH), has_ended=False)
            if not name:
                continue
            drafter = int(name[1:])
            # Whatever it kept of the request is gone: it reads all of it again.
            read_s = self._costs.rebuild_s(name, view.num_context)
            self._reading.append(_Reading(drafter, self.ids.index(view.request_id), read_s))
            self.losses.read_s += read_s
            served = sum(goodput[i][drafter] for i, j in enumerate(self.place) if j == drafter)
            self.losses.reading[slot] += read_s * served

    def _read(self, bandit: Bandit) -> None:
        """Drafts come first: drafters read in what is left of the slot, and are scored when through.

        As in a cell nobody drafts while the target verifies, however long a drafter's own drafts take.
        """
        idle_s = [max(VERIFY_S, bandit.slot_s - busy_s) for busy_s in self._busy_s]
        self.losses.idle_s += sum(idle_s)
        if not self._reading:
            return
        for one in self._reading:
            one.left_s -= idle_s[one.drafter]
            if one.left_s <= 0.0:
                i, j = one.request, one.drafter
                scored = min(self.output[i] - self.scored_at[i][j], WINDOW_TOKENS)
                self.scored_at[i][j] = self.output[i]
                if self.place[i] != j and scored > 0:
                    agreed = int(self._scores.binomial(scored, bandit.rates[i, j]))
                    self.selector.score(self.ids[i], self.names[j], scored, agreed)
        self._reading = [one for one in self._reading if one.left_s > 0.0]
