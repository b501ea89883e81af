"""LBSS, SPIN's learning-based selection (Algorithms 1 and 2).

Epoch k explores for `alpha` slots, in chunks of `beta` slots that a request spends on one random drafter, and
then exploits for 2^k slots: the maximum-weight matching on the goodput seen while exploring.

Algorithm 2 as printed draws once per exploration; the text draws for every chunk, and so does this. Averages
are over the exploration slots of all epochs, without which more epochs would not make them more precise.
What the paper leaves open, because its requests are there from beginning to end: a request that comes later
explores by itself for `alpha` slots and is matched then, and whenever somebody leaves or a drafter comes or
goes those who exploit are matched anew. A slot is a step that drafts: who is only read has the drafter of its
next chunk meanwhile, and spends none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selector.assignment import NONE, capacity_prices, match
from selector.averages import GoodputAverages
from selector.places import Places, kinds_of
from selector.protocol import MovesOnSchedule, Outcome, PoolView, RequestView

# Of equal matchings the one that moves fewest: staying weighs this share more.
STAYING = 1e-9
# Goodput of a kind of which nothing has been seen yet: less than any, and more than having no drafter.
UNSEEN = 1e-6


@dataclass(slots=True)
class _State:
    """Of one request.

    Attributes:
        slot: last slot it was to draft in.
        left: slots of exploration it has left; 0 while it exploits.
        chunk_left: of them in its chunk.
        kind, next_kind: drawn for its chunk and, ahead of time, for the one after.
        place: instance it holds.
        is_matched: whether `place` is what the matching gave it.
        is_observed: whether its present slot is one of exploration.
    """

    slot: int
    left: int
    chunk_left: int = 0
    kind: str = ""
    next_kind: str = ""
    place: str = ""
    is_matched: bool = False
    is_observed: bool = False


class Lbss(MovesOnSchedule):
    """SPIN's bandit. In exploitation a slot costs a look-up per request."""

    learns_from_steps = True
    learns_from_scores = False

    def __init__(self, alpha: int = 16, beta: int = 4, switching_weight: float = 1.0, seed: int = 0) -> None:
        """Begin with the exploration of epoch 1.

        Args:
            alpha: slots of exploration per epoch.
            beta: slots of a chunk; the last one is shorter if it does not divide `alpha`.
            switching_weight: SPIN's lambda, by which `switching_cost` counts. It is part of the regret
                (eq. 6) and not of any decision, in the paper as here.
            seed: of the draws.

        Raises:
            ValueError: unless 1 <= beta <= alpha.
        """
        if not 1 <= beta <= alpha:
            raise ValueError(f"beta must be from 1 to alpha = {alpha}, not {beta}")
        self._alpha, self._beta, self._weight = alpha, beta, switching_weight
        self._random = np.random.default_rng(seed)
        self._averages = GoodputAverages()
        self._states: dict[str, _State] = {}
        self._capacities: dict[str, int] = {}
        self._prices: dict[str, float] = {}
        self._slot = 0
        self.epoch, self.is_exploring, self.slots_left = 1, True, alpha
        self.num_switches, self.switching_cost = 0, 0.0

    def begin(self, request_id: str, prompt: Sequence[int], labels: Sequence[str] = ()) -> None:
        """Nothing is known of a request before it ran."""

    def assign(self, requests: Sequence[RequestView], pool: PoolView) -> dict[str, str]:
        """See `Selector`."""
        if not requests:
            return {}
        states = [self._state(request) for request in requests]
        pairs = list(zip(requests, states, strict=True))
        if any(state.slot == self._slot for request, state in pairs if request.is_drafting):
            self._next_slot()
        capacities = {name: drafter.capacity for name, drafter in pool.drafters.items()}
        if capacities != self._capacities:
            self._capacities = capacities
            self._unsettle()
        has_moves = False
        for request, state in pairs:
            if request.is_drafting:
                state.slot = self._slot
            is_due = not state.chunk_left if state.left else not state.is_matched
            is_lost = state.place != request.current or (state.place and state.place not in request.allowed)
            has_moves = has_moves or is_due or bool(is_lost)
        if has_moves:
            self._place(requests, states, pool)
        chosen = {}
        for request, state in pairs:
            if request.is_drafting:
                state.is_observed = state.left > 0
                if state.left:
                    state.left -= 1
                    state.chunk_left -= 1
            if state.place != request.current:
                self._count_switch(request, state.place, pool)
            chosen[request.request_id] = state.place
        return chosen

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See `Selector`; slots of exploitation do not count, as in the paper."""
        for outcome in outcomes:
            state = self._states.get(outcome.request_id)
            if state is not None and state.is_observed and outcome.kind and outcome.seconds > 0.0:
                self._averages.add(outcome.request_id, outcome.kind, outcome.num_tokens / outcome.seconds)

    def score(self, request_id: str, kind: str, scored: int, agreed: int) -> None:
        """A bandit sees only what it chose."""

    def destination(self, request: RequestView, pool: PoolView) -> str:
        """SPIN section IV-C: what was drawn, or before exploitation the kind of the highest average.

        Empty while exploitation goes on for longer than a chunk.
        """
        state = self._states.get(request.request_id)
        if state is None:
            return ""
        if state.is_observed and state.left <= state.chunk_left:
            kinds = kinds_of(request, pool)
            kind = max(kinds, key=lambda kind: self._averages.mean(request.request_id, kind), default="")
        elif state.is_observed or (not self.is_exploring and self.slots_left <= self._beta):
            kind = state.next_kind
        else:
            return ""
        place = Places((request,), pool).of_kind(request, kind)
        return "" if place == request.current else place

    def forget(self, request_id: str) -> None:
        """See `Selector`."""
        state = self._states.pop(request_id, None)
        self._averages.forget(request_id)
        if state is not None and state.place:
            self._unsettle()

    def begin_anew(self, kind: str) -> None:
        """See `BeginsAnew`."""
        self._averages.begin_anew(kind)
        self._unsettle()

    def prices(self) -> Mapping[str, float]:
        """See `Selector`; of the last matching."""
        return self._prices

    def estimate(self, request_id: str, kind: str) -> float:
        """The average g~ (tokens per second) that the matching goes by."""
        return self._averages.mean(request_id, kind)

    def _state(self, request: RequestView) -> _State:
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = _State(slot=-1, left=self._alpha)
        return state

    def _unsettle(self) -> None:
        """Other places are free: all who exploit are matched anew, each when it is next asked about."""
        for state in self._states.values():
            state.is_matched = False

    def _next_slot(self) -> None:
        """A request is to draft for the second time: the slot before is over."""
        self._slot += 1
        self.slots_left -= 1
        if self.slots_left:
            return
        self.is_exploring = not self.is_exploring
        if self.is_exploring:
            self.epoch += 1
            self.slots_left = self._alpha
            for state in self._states.values():
                state.left, state.chunk_left, state.is_matched = self._alpha, 0, False
        else:
            self.slots_left = 2**self.epoch

    def _place(self, requests: Sequence[RequestView], states: Sequence[_State], pool: PoolView) -> None:
        """Draw for those whose chunk begins, then match those who exploit; others keep their places."""
        places = Places(requests, pool)
        drawing: list[tuple[RequestView, _State]] = []
        matching: list[tuple[RequestView, _State]] = []
        must_match = False
        for request, state in zip(requests, states, strict=True):
            keeps = not state.place or places.has_room(request, state.place)
            if state.left:
                keeps = keeps and state.chunk_left > 0
                if not keeps:
                    drawing.append((request, state))
            else:
                matching.append((request, state))
                must_match = must_match or not (state.is_matched and keeps)
            state.place = places.take(state.place) if keeps else ""
        if must_match:
            for _, state in matching:
                places.leave(state.place)
        if must_match:
            self._match(matching, places, pool)
        self._draw(drawing, places, pool)

    def _draw(self, pairs: Sequence[tuple[RequestView, _State]], places: Places, pool: PoolView) -> None:
        """A random kind for each; of those who drew a full kind, as many as it takes are kept at random."""
        for request, state in pairs:
            kinds = kinds_of(request, pool)
            if not state.chunk_left:
                state.chunk_left = min(self._beta, state.left)
            state.kind = state.next_kind if state.next_kind in kinds else self._any(kinds)
            state.next_kind = self._any(kinds)
            state.place = ""
        free: dict[str, int] = {}
        for name, drafter in pool.drafters.items():
            free[drafter.kind] = free.get(drafter.kind, 0) + max(0, places.free[name])
        kept: list[tuple[bool, int, RequestView, _State]] = []
        for index in self._random.permutation(len(pairs)).tolist():
            request, state = pairs[index]
            if free.get(state.kind, 0) > 0:
                free[state.kind] -= 1
                kept.append((self._kind(request.current, pool) != state.kind, len(kept), request, state))
        # Among the instances of a kind those who are there already stay.
        for _, _, request, state in sorted(kept, key=lambda entry: entry[:2]):
            state.place = places.take(places.of_kind(request, state.kind))

    def _match(self, pairs: Sequence[tuple[RequestView, _State]], places: Places, pool: PoolView) -> None:
        """Problem (10) for those who exploit, on the places the others leave."""
        if not pairs:
            return
        names = sorted(pool.drafters)
        weights = np.full((len(pairs), len(names)), -np.inf)
        for row, (request, _) in enumerate(pairs):
            for column, name in enumerate(names):
                if name in request.allowed:
                    seen = self.estimate(request.request_id, pool.drafters[name].kind)
                    weights[row, column] = max(seen, UNSEEN)
                    if name == request.current:
                        weights[row, column] *= 1.0 + STAYING
        capacities = np.array([places.free[name] for name in names], dtype=np.int64)
        columns = match(weights, capacities).columns
        for (_, state), column in zip(pairs, columns.tolist(), strict=True):
            state.place = "" if column == NONE else places.take(names[column])
            state.is_matched = True
        self._prices = {}
        for name, price in zip(names, capacity_prices(weights, columns).tolist(), strict=True):
            kind = pool.drafters[name].kind
            self._prices[kind] = max(price, self._prices.get(kind, 0.0))

    def _any(self, kinds: Sequence[str]) -> str:
        return kinds[int(self._random.random() * len(kinds))] if kinds else ""

    @staticmethod
    def _kind(name: str, pool: PoolView) -> str:
        return pool.drafters[name].kind if name in pool.drafters else ""

    def _count_switch(self, request: RequestView, place: str, pool: PoolView) -> None:
        if place and request.num_steps:
            self.num_switches += 1
            cost = pool.costs.rebuild_s(pool.drafters[place].kind, request.num_context)
            self.switching_cost += self._weight * cost
