"""Requests without objectives give way to those that have some, within limits."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cluster.batching.base import BatchContext
from cluster.batching.batcher import Batcher
from cluster.batching.common import has_objective
from cluster.batching.fair_queue import FairQueue
from cluster.batching.registry import make_rule
from cluster.config import SchedulerConfig
from cluster.drafter_pool import DrafterPool
from cluster.requests import Request, State
from cluster.stream_messages import Tenant
from tests.cluster.batch_states import RUNNING, TPOTS_MS, context, contexts, cost, request


def batcher(batching: str = "flotilla") -> Batcher:
    costs = cost()
    return Batcher(SchedulerConfig(batching=batching), costs, DrafterPool(costs, 4))


def of(tenant: str, made: Request) -> Request:
    """The same, of a tenant."""
    made.submit = msgspec.structs.replace(made.submit, tenant=Tenant(tenant))
    return made


def running(count: int, tpot_ms: float | None) -> list[Request]:
    return [request(number, State.READY, tpot_ms=tpot_ms) for number in range(count)]


def admitted(
    waiting: list[Request], here: list[Request], now: BatchContext, batching: str = "flotilla"
) -> list[Request]:
    return batcher(batching).admit(waiting, here, now).admitted


def best_effort(count: int) -> list[Request]:
    return [request(100 + number) for number in range(count)]


def test_they_wait_where_another_would_make_those_late_that_have_objectives() -> None:
    """An iteration of n takes 6 ms and 1.2 ms more for each, and yields 1.5 tokens: 7.2 ms each for four."""
    for tpot_ms, places in ((20.0, 5), (7.0, 1), (8.5, 1), (10.0, 3)):
        assert len(admitted(best_effort(5), running(4, tpot_ms), context())) == places
    assert len(admitted(best_effort(5), running(4, 7.0), context(), "fcfs")) == 5


def test_they_wait_the_longer_the_more_are_late() -> None:
    rooms = [
        len(admitted(best_effort(8), running(4, 10.0), context(headroom=headroom)))
        for headroom in (0.1, 0.2, 0.3, 0.8)
    ]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[0] > rooms[-1] == 1


def test_some_always_run() -> None:
    late = running(4, 5.0)
    assert len(admitted(best_effort(8), late, context(max_running=16))) == 2
    at_work = [*late, request(50, State.READY), request(51, State.READY)]
    assert admitted(best_effort(8), at_work, context(max_running=16)) == []


def test_they_do_not_wait_for_the_sake_of_what_cannot_be_reached() -> None:
    """One by itself gets a token in 4.8 ms."""
    assert len(admitted(best_effort(8), running(4, 4.7), context())) == 8
    assert len(admitted(best_effort(8), running(4, 4.9), context())) == 1


def test_who_has_objectives_does_not_wait_behind_them() -> None:
    """Even where it is their tenant's turn."""
    queue = [of("a", made) for made in best_effort(4)] + [of("b", request(200, tpot_ms=7.0, priority=20))]
    here = [*running(4, 7.0), request(60, State.READY)]
    rules = batcher()
    rules.fair.counters = {"a": 0.0, "b": 1000.0}
    assert [one for one in queue if rules.ahead_of(one, queue, here, context()).ahead is None] == [queue[-1]]
    assert rules.in_order(queue, here, context())[0] is queue[-1]
    assert rules.admit(queue, here, context()).admitted == [queue[-1]]


def test_tenants_take_turns_for_what_is_left() -> None:
    queue = [of("greedy", made) for made in best_effort(6)] + [of("other", request(300))]
    rules = batcher()
    rules.fair.counters = {"greedy": 1000.0, "other": 0.0}
    assert rules.admit(queue, running(4, 7.0), context()).admitted == [queue[-1]]


@given(contexts(), st.data())
def test_nobody_is_held_back_for_an_empty_cell_and_nobody_with_objectives_ever(
    now: BatchContext, data: st.DataObject
) -> None:
    now = msgspec.structs.replace(now, headroom=data.draw(st.floats(0.0, 0.8)), free_slots=10_000)
    objectives = data.draw(st.lists(st.sampled_from(TPOTS_MS), min_size=1, max_size=8))
    queue = [request(100 + number, tpot_ms=tpot_ms) for number, tpot_ms in enumerate(objectives)]
    here = [
        request(number, data.draw(st.sampled_from(RUNNING)), tpot_ms=data.draw(st.sampled_from(TPOTS_MS)))
        for number in range(data.draw(st.integers(0, now.max_running - 1)))
    ]
    taken = admitted(queue, here, now)
    room = now.max_running - len(here)
    urgent = [one for one in queue if has_objective(one)]
    assert taken or here, "nobody is served although somebody waits"
    assert len([one for one in taken if has_objective(one)]) >= min(room, len(urgent)) - len(
        [one for one in taken if not has_objective(one)]
    )
    if not any(map(has_objective, (*here, *queue))):
        assert len(taken) == min(room, len(queue))


def test_nobody_is_given_what_those_held_back_did_not_get() -> None:
    """Their counter stood still, and whoever began there took all places from a key that had been served."""
    for newcomer in ("new", "held"):
        fair, rule = FairQueue(), make_rule("fcfs")
        waiting = [of("held", made) for made in best_effort(3)]
        held = frozenset(waiting)
        taken: list[str] = []
        for number in range(60):
            for label in ("old",) if number < 40 else ("old", newcomer):
                waiting.append(of(label, request(200 + number, tpot_ms=7.0)))
            (one,) = fair.admit(rule, waiting, [], context(max_running=1), held).admitted
            waiting.remove(one)
            one.extend([1] * 100)
            one.state = State.FINISHED
            taken.append(one.submit.tenant.label)
        assert 9 <= taken[40:].count("old") <= 11
        first = fair.admit(rule, waiting, [], context(max_running=3)).admitted
        assert any(one in held for one in first)  # nor do they wait longer, once they are not held back
