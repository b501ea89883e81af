"""The selector of this system: full information about all drafters instead of a bandit's.

A drafter can be scored on committed tokens whoever drafted them, so nobody has to draft badly for somebody to
learn. The estimates are those of `selector.acceptance`; the reward is goodput at the best depth; a move pays
for the reading it takes, out of what the request may still expect; and the rival's estimate is taken at the
lower end of what is known of it, so that noise moves nobody. Whether drafting pays at all is not decided
here: that is a question of all requests of a step, and the policy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, nextafter
from typing import NamedTuple

import numpy as np

from selector.acceptance import AcceptanceEstimates
from selector.assignment import NONE, capacity_prices, match
from selector.exploration import Exploration
from selector.outlook import Outlook
from selector.places import Places, kinds_of
from selector.protocol import Outcome, PoolView, RequestView, StepCosts
from selector.team import BatchCosts, ShareCosts, Team, TeamSearch

# A request's drafter is reconsidered every so many verify steps; in a long one, of which much is known, after
# one step in so many, but at least this often. A joint matching comes no more often than the first of these.
RECONSIDER_STEPS = 8
RECONSIDER_SHARE = 64
MOST_RECONSIDER_STEPS = 64
# Who drafts together is looked at again after so many slots, and when requests are this many more or fewer.
TEAM_SLOTS = 16
TEAM_CHANGE = 1.5
# Tokens a step of a drafted request is taken to bring, to spread the reading of a switch over its steps.
STEP_TOKENS = 2.0
# A rival counts as this many standard deviations worse than its estimate (hysteresis).
CAUTION = 0.5


class _Value(NamedTuple):
    """Tokens per second on a kind, for one who is there and for one who moves there."""

    staying: float
    moving: float


@dataclass(slots=True)
class _State:
    """Of one request: where it is, when to look again, and what it may expect of which kind."""

    place: str
    due_at: int
    none: float = 0.0
    values: dict[str, _Value] = field(default_factory=dict)


class Flotilla:
    """Every request on the drafter of highest goodput, by matching where there are too few places."""

    learns_from_steps = False

    def __init__(self, estimates: AcceptanceEstimates | None = None) -> None:
        """Decide by `estimates`, which somebody else feeds with scores; by its own if None."""
        self.learns_from_scores = estimates is None
        self._estimates = AcceptanceEstimates() if estimates is None else estimates
        self._exploration = Exploration(self._estimates)
        self._states: dict[str, _State] = {}
        self._kinds: dict[str, str] = {}
        self._present = frozenset[str]()  # instances when `assign` was last called
        self._prices: dict[str, float] = {}
        self._slot = 0
        self._matched_at = -RECONSIDER_STEPS
        self._is_contended = False
        self._team = Team({}, 0.0, 0)
        self._team_slot, self._team_size, self._team_pool = -TEAM_SLOTS, 0, frozenset[str]()
        self._team_places = inf  # where others take no more
        # What was worked out last: whether costs are of batches too, and a pool's shared costs.
        self._batch_costs: tuple[StepCosts | None, BatchCosts | None] = (None, None)
        self._last_shared: tuple[PoolView, PoolView] | None = None

    def begin(self, request_id: str, prompt: Sequence[int], labels: Sequence[str] = ()) -> None:
        """See `Selector`."""
        self._estimates.begin(request_id, prompt, labels)

    def assign(self, requests: Sequence[RequestView], pool: PoolView) -> dict[str, str]:
        """See `Selector`. Where nobody is due it costs a look-up per request."""
        self._slot += 1
        if not pool.max_depth:
            return {request.request_id: "" for request in requests}
        self._gather(requests, pool)
        states, drafters = self._states, pool.drafters
        if drafters.keys() != self._present:
            if drafters.keys() - self._present:
                for waiting in [one for one in states.values() if not one.place]:
                    waiting.due_at = 0
            self._present = frozenset(drafters)
        chosen: dict[str, str] = {}
        due = []
        for request in requests:
            place = request.current
            chosen[request.request_id] = place
            state = states.get(request.request_id)
            if (
                state is None
                or request.num_steps >= state.due_at
                or state.place != place
                or (place and (place not in drafters or place not in request.allowed))
            ):
                due.append(request)
        may_match = self._slot - self._matched_at >= RECONSIDER_STEPS
        if not due and not (self._is_contended and may_match):
            return chosen
        self._notice(pool)
        shared = self._shared(pool)
        for request in due:
            self._consider(request, shared)
        self._is_contended = not self._choose_freely(due, pool, chosen) or self._is_contended
        if self._is_contended and may_match:
            self._match(requests, pool, chosen)
            self._is_contended, self._matched_at = False, self._slot
            due = list(requests)  # whoever else was matched may have moved, too
        elif not self._is_contended and self._slot - self._matched_at > 2 * MOST_RECONSIDER_STEPS:
            self._prices = dict.fromkeys(self._kinds.values(), 0.0)
        for request in due:
            states[request.request_id].place = chosen[request.request_id]
        return chosen

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing: accepted tokens say less than scores do, for only tokens a drafter was sure of count."""

    def score(self, request_id: str, kind: str, scored: int, agreed: int) -> None:
        """See `Selector`; ignored if the estimates are somebody else's, who feeds them."""
        if self.learns_from_scores:
            self._estimates.observe(request_id, kind, scored, agreed)

    def destination(self, request: RequestView, pool: PoolView) -> str:
        """The kind that promises most after the present one, if it may turn out better than that."""
        self._notice(pool)
        pool = self._shared(pool)
        outlook, here = Outlook(request, pool), self._kinds.get(request.current, "")
        to_beat = outlook.none
        if here:
            to_beat = outlook.goodput(here, self._estimates.rate(request.request_id, here))
        best, best_value = "", to_beat
        for kind in self._candidates(request, pool):
            if kind != here:
                rate, spread = self._estimates.posterior(request.request_id, kind)
                value = outlook.after_moving(kind, outlook.goodput(kind, min(1.0, rate + spread)))
                if value > best_value:
                    best, best_value = kind, value
        return Places((), pool).of_kind(request, best) if best else ""

    def explore(self, request: RequestView, pool: PoolView, *, has_ended: bool) -> str:
        """See `Explores`."""
        self._notice(pool)
        if not pool.max_depth:
            return ""
        if has_ended:
            return self._exploration.on_ended(request, pool, self._kinds)
        kind = self._kinds.get(request.current, "")
        return self._exploration.on_running(request, kind, pool, self._prices)

    def forget(self, request_id: str) -> None:
        """See `Selector`. The place is another's at once, if one waits that can draft."""
        state = self._states.pop(request_id, None)
        if state is not None and state.place:
            for waiting in self._states.values():
                if not waiting.place and waiting.values:
                    waiting.due_at = 0
                    break
        self._exploration.forget(request_id)
        self._estimates.forget(request_id)

    def prices(self) -> Mapping[str, float]:
        """See `Selector`; of the last matching, 0 where for long there were places for all."""
        return self._prices

    def _notice(self, pool: PoolView) -> None:
        for name, drafter in pool.drafters.items():
            if name not in self._kinds:
                self._kinds[name] = drafter.kind
                if not self._estimates.is_known(drafter.kind):
                    self._exploration.restart()

    def _gather(self, requests: Sequence[RequestView], pool: PoolView) -> None:
        """Choose anew, now and then, which kinds draft together, where drafters share processors."""
        costs, size = self._of_batches(pool.costs), max(len(self._states), len(requests))
        self._last_shared = None
        if size < 2 or costs is None or not pool.max_depth:
            self._team, self._team_size = Team({}, 0.0, 0), 0  # nobody to share with
            return
        kinds = frozenset(drafter.kind for drafter in pool.drafters.values())
        is_same = kinds == self._team_pool and bool(self._team.counts)
        is_alike = self._team_size / TEAM_CHANGE <= size <= self._team_size * TEAM_CHANGE
        is_alike = is_alike and len(requests) <= self._team_places
        if is_same and (2 * len(requests) < size or (is_alike and self._slot - self._team_slot < TEAM_SLOTS)):
            return
        self._notice(pool)
        self._team_slot, self._team_size, self._team_pool = self._slot, size, kinds
        names, before = sorted(kinds), self._team.counts.keys()
        rates = np.full((len(requests), len(names)), -1.0)
        reading_s = np.zeros(rates.shape)
        # Mostly all may use the same instances.
        usable: dict[tuple[str, ...], set[str]] = {}
        for row, request in enumerate(requests):
            here = self._kinds.get(request.current, "")
            steps = max(1.0, Outlook(request, pool).num_expected / STEP_TOKENS)
            mine = usable.get(request.allowed)
            if mine is None:
                mine = usable[request.allowed] = {self._kinds.get(name, "") for name in request.allowed}
            for column, kind in enumerate(names):
                if kind in mine:
                    rates[row, column] = self._estimates.rate(request.request_id, kind)
                    if kind != here and request.num_steps:
                        reading_s[row, column] = pool.costs.rebuild_s(kind, request.num_context) / steps
        num_context = sum(request.num_context for request in requests)
        free = Places(requests, pool).free
        places = dict.fromkeys(names, 0)
        for name, drafter in pool.drafters.items():
            places[drafter.kind] += max(0, free[name])
        search = TeamSearch(
            names, rates, reading_s, list(places.values()), num_context, costs, pool.max_depth
        )
        self._team = search.best(before)
        self._team_places = inf if self._team.num_waiting else sum(places[kind] for kind in self._team.counts)
        if self._team.counts.keys() != before:
            for state in self._states.values():
                state.due_at = 0

    def _shared(self, pool: PoolView) -> PoolView:
        """The pool with what a request costs as one of a batch."""
        costs = self._of_batches(pool.costs)
        if self._team_size < 2 or costs is None:
            return pool
        if self._last_shared is None or self._last_shared[0] is not pool:
            share = ShareCosts(pool.costs, costs, self._team_size, self._team)
            shared = PoolView(pool.drafters, share, pool.max_depth)
            self._last_shared = (pool, shared)
        return self._last_shared[1]

    def _of_batches(self, costs: StepCosts) -> BatchCosts | None:
        """The costs, if they are of batches too; to ask it of the protocol takes as long as a choice."""
        if self._batch_costs[0] is not costs:
            self._batch_costs = (costs, costs if isinstance(costs, BatchCosts) else None)
        return self._batch_costs[1]

    def _candidates(self, request: RequestView, pool: PoolView) -> list[str]:
        """Kinds that the request may use; of the team, if it may use any of that."""
        kinds = kinds_of(request, pool)
        return [kind for kind in kinds if kind in self._team.counts] or kinds

    def _consider(self, request: RequestView, pool: PoolView) -> None:
        """Work out what the request may expect of every kind it may use."""
        outlook, steps = Outlook(request, pool), request.num_steps
        wait = min(max(RECONSIDER_STEPS, steps // RECONSIDER_SHARE), MOST_RECONSIDER_STEPS)
        state = self._states[request.request_id] = _State(request.current, steps + wait, outlook.none)
        # Without a present drafter to compare with there is nothing to be cautious about.
        caution = CAUTION if steps else 0.0
        for kind in self._candidates(request, pool):
            rate, spread = self._estimates.posterior(request.request_id, kind)
            staying = outlook.goodput(kind, rate)
            doubtful = outlook.goodput(kind, max(0.0, rate - caution * spread)) if caution else staying
            state.values[kind] = value = _Value(staying, outlook.after_moving(kind, doubtful))
            # Any drafter is better than none.
            state.none = min(state.none, nextafter(min(value), -inf))

    def _choose_freely(self, due: Sequence[RequestView], pool: PoolView, chosen: dict[str, str]) -> bool:
        """Each of `due` takes the best drafter with room; whether all had the best of all."""
        places = Places(due, pool)  # the others keep theirs
        # Who may stay keeps its place against who comes: first all sit down, then one by one may get up.
        for request in due:
            place = request.current
            chosen[request.request_id] = places.take(place) if places.has_room(request, place) else ""
        all_best = True
        for request in due:
            state, place = self._states[request.request_id], chosen[request.request_id]
            here = pool.drafters[place].kind if place else ""
            if here not in state.values:  # it no longer drafts
                places.leave(place)
                place = here = chosen[request.request_id] = ""
            options = [(state.values[here].staying, here)] if here else []
            options += [(value.moving, kind) for kind, value in state.values.items() if kind != here]
            for _, kind in sorted(options, key=lambda option: (-option[0], option[1])):
                if kind == here:
                    break
                found = places.of_kind(request, kind)
                if found:
                    places.leave(place)
                    chosen[request.request_id] = places.take(found)
                    break
                all_best = False
            else:
                places.leave(place)
                chosen[request.request_id] = ""
        return all_best

    def _match(self, requests: Sequence[RequestView], pool: PoolView, chosen: dict[str, str]) -> None:
        """All requests anew, by the values of when each was last considered."""
        names = sorted(pool.drafters)
        kinds = [pool.drafters[name].kind for name in names]
        weights = np.full((len(requests), len(names)), -np.inf)
        none = np.zeros(len(requests))
        for row, request in enumerate(requests):
            state = self._states[request.request_id]
            none[row] = state.none
            for column, (name, kind) in enumerate(zip(names, kinds, strict=True)):
                if name in request.allowed and kind in state.values:
                    value = state.values[kind]
                    weights[row, column] = value.staying if name == request.current else value.moving
        free = Places(requests, pool).free
        capacities = np.array([free[name] for name in names], dtype=np.int64)
        columns = match(weights, capacities, none).columns
        for request, column in zip(requests, columns.tolist(), strict=True):
            chosen[request.request_id] = "" if column == NONE else names[column]
        self._prices = {}
        for kind, price in zip(kinds, capacity_prices(weights, columns, none).tolist(), strict=True):
            self._prices[kind] = max(price, self._prices.get(kind, 0.0))
