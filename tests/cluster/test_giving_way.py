"""Whoever finds a place that somebody gives up is predicted to begin with the next step."""

from __future__ import annotations

import pytest

from cluster.batching.batcher import Batcher
from cluster.config import SchedulerConfig
from cluster.drafter_pool import DrafterPool
from cluster.requests import Request, State
from cluster.stream_messages import Objective, Tenant
from tests.cluster.batch_states import context, cost, request
from tests.cluster.giving_way import PLACES, Full

FULL = context(max_running=PLACES)


def batcher(rule: str) -> Batcher:
    costs = cost()
    return Batcher(SchedulerConfig(batching=rule), costs, DrafterPool(costs, 4))


def full_cell(state: State) -> list[Request]:
    return [request(0, State.VERIFYING, tpot_ms=50.0)] + [
        request(number, state, priority=5) for number in range(1, PLACES)
    ]


@pytest.mark.parametrize("rule", ["flotilla", "priority"])
@pytest.mark.parametrize("state", [State.READY, State.VERIFYING])
def test_who_gives_way_does_so_when_its_call_is_answered(rule: str, state: State) -> None:
    running, coming = full_cell(state), request(50, tpot_ms=20.0)
    rules = batcher(rule)
    turn = rules.ahead_of(coming, [coming], running, FULL)
    assert turn.ahead is None
    assert turn.admission.preempted == [running[-1]]
    # It takes the place when nobody is in the call any more, which is what is asked of the rule then.
    assert bool(rules.admit([coming], running, FULL).admitted) is (state is State.READY)


def test_under_a_rule_that_takes_no_places_it_waits_for_an_end() -> None:
    running, coming = full_cell(State.READY), request(50, tpot_ms=20.0)
    turn = batcher("sarathi").ahead_of(coming, [coming], running, FULL)
    assert (turn.ahead, turn.admission.admitted, turn.admission.preempted) == ([], [], [])


def test_of_two_who_come_for_one_place_the_second_waits_for_an_end() -> None:
    running = [request(0, State.READY, tpot_ms=50.0), request(1, State.READY, tpot_ms=50.0)]
    running += [request(number, State.READY, priority=5) for number in (2, 3)]
    first, second = request(50, tpot_ms=20.0), request(51, tpot_ms=20.0)
    turn = batcher("flotilla").ahead_of(second, [first, second], running, FULL)
    assert turn.ahead == [first]
    assert turn.admission.admitted == [first]
    assert turn.admission.preempted == [running[-1]]


@pytest.mark.parametrize("num_coming", [1, PLACES - 1])
def test_whoever_is_given_a_place_is_not_refused_for_the_time_until_one_ends(num_coming: int) -> None:
    world = Full()
    running, forecast = world.core.running.values(), world.core.door.forecast
    end_ms = 1e3 * forecast.schedule(running, (), is_full=True, drafts=False).start_s
    objective = Objective(ttft_ms=end_ms / 4)
    for number in range(num_coming):
        world.ask(f"r{number}", objective=objective, on_miss="reject", tenant=Tenant("interactive"))
    assert world.rejected == {}
    predicted = [world.core.requests[f"r{number}"].predicted for number in range(num_coming)]
    assert all(one is not None and 0.0 < one.ttft_ms < end_ms / 4 for one in predicted)
    for _ in range(4):
        world.answer_one()
    assert all(world.core.requests[f"r{number}"].output for number in range(num_coming))
    world.drain()
    assert len(world.reason) == PLACES + num_coming
