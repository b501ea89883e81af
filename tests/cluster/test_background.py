"""Requests without objectives and of a priority above 0 have only the time that the others leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.batching.background import is_background, most_urgent
from cluster.batching.batcher import Batcher
from cluster.batching.flotilla import LEAST_CHUNK, Flotilla
from cluster.config import SchedulerConfig
from cluster.drafter_pool import DrafterPool
from cluster.invariants import check_at_rest
from cluster.requests import Request, State
from cluster.stream_messages import Objective, Submit
from tests.cluster.ahead_world import LONG, AheadWorld, ends, ids, interrupt, is_ahead
from tests.cluster.batch_states import NOW, context, cost, request, roofline
from tests.examples import examples

FLOTILLA = Flotilla()
# An iteration of n takes 6 ms and 1.2 ms more for each, and yields 1.5 tokens: four take 7.2 ms a token.
ROOMY_MS, TIGHT_MS = 20.0, 7.0


def paced(count: int, tpot_ms: float, state: State = State.READY) -> list[Request]:
    return [request(number, state, tpot_ms=tpot_ms) for number in range(count)]


def background(count: int, state: State = State.WAITING, priority: int = 5) -> list[Request]:
    return [request(100 + number, state, priority=priority) for number in range(count)]


def admitted(waiting: list[Request], running: list[Request], **changes: object) -> list[Request]:
    costs = cost()
    batcher = Batcher(SchedulerConfig(batching="flotilla"), costs, DrafterPool(costs, 4))
    return batcher.admit(waiting, running, context(**changes)).admitted


def test_who_says_nothing_is_not_in_the_background_and_nobody_is_who_has_objectives() -> None:
    assert [is_background(request(1, priority=priority), 0) for priority in (-1, 0, 1)] == [
        False,
        False,
        True,
    ]
    assert not is_background(request(1, priority=1), 1)
    assert not is_background(request(1, priority=0), -5)
    assert not is_background(request(1, priority=5, tpot_ms=20.0), 0)
    assert not is_background(request(1, priority=5, ttft_ms=200.0), 0)
    assert most_urgent([request(1, priority=3), request(2, priority=-1)]) == -1
    assert not is_background(request(1, priority=10**6), most_urgent([]))


def test_it_is_held_to_its_own_headroom_and_has_no_share_of_the_places() -> None:
    wide = {"max_running": 40, "headroom": 0.0}
    rooms = [
        len(admitted(background(30), paced(4, ROOMY_MS), background_headroom=headroom, **wide))
        for headroom in (0.0, 0.2, 0.4, 0.9)
    ]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[0] > rooms[1] > rooms[-1] == 1
    ordinary = background(30, priority=0)
    assert len(admitted(ordinary, paced(4, ROOMY_MS), background_headroom=0.9, **wide)) == rooms[0]
    late = context(max_running=40, headroom=0.9)
    assert (
        len(admitted(ordinary, paced(4, TIGHT_MS), max_running=40, headroom=0.9))
        == 5
        == late.max_running // 8
    )


def test_one_of_it_runs_whatever_it_costs_and_all_where_nobody_has_objectives() -> None:
    assert len(admitted(background(8), paced(4, TIGHT_MS))) == 1
    assert admitted(background(8), [*paced(4, TIGHT_MS), *background(1, State.READY)]) == []
    assert len(admitted(background(8), [request(1, State.READY)])) == 8


def test_those_who_come_first_are_let_in_first() -> None:
    both = [*background(3), *(request(200 + n) for n in range(2))]
    taken = admitted(both, paced(2, TIGHT_MS), max_running=16)
    assert [one.submit.priority for one in taken[:2]] == [0, 0]


def test_it_sits_out_of_steps_that_would_be_too_long() -> None:
    running = [*paced(4, TIGHT_MS), *background(3, State.READY)]
    assert FLOTILLA.decode(running, running, context()) == running[:5]
    roomy = [*paced(4, ROOMY_MS), *background(3, State.READY)]
    assert FLOTILLA.decode(roomy, roomy, context(max_running=40)) == roomy
    assert FLOTILLA.decode(running[4:], running[4:], context()) == running[4:]


def test_no_more_of_it_join_a_step_that_has_begun() -> None:
    """Who sat out is offered again with each draft that comes."""
    begun = [*paced(4, TIGHT_MS, State.DRAFTING), *background(1, State.DRAFTED)]
    left_out = [request(200, State.READY, priority=5)]
    assert FLOTILLA.decode(left_out, [*begun, *left_out], context()) == []


def test_it_gives_way_to_whoever_has_objectives_when_the_cell_is_full() -> None:
    running = [*paced(1, ROOMY_MS), *background(3, State.READY)]
    coming = request(50, tpot_ms=ROOMY_MS)
    full = context(max_running=4)
    assert FLOTILLA.may_take_place([coming], running, full)
    answer = FLOTILLA.admit([coming], running, full)
    assert (answer.admitted, answer.preempted) == ([coming], [running[-1]])
    for one in running:  # however often it has given way
        one.num_preemptions = 3
    assert FLOTILLA.admit([coming], running, full).preempted == [running[-1]]
    in_calls = [*running[:2], *background(2, State.VERIFYING)]
    assert FLOTILLA.admit([coming], in_calls, full).admitted == []
    for others in ([request(50)], [request(50, priority=9)], [request(50, priority=5, tpot_ms=9.0)]):
        assert not FLOTILLA.may_take_place(others, running, full)
        assert FLOTILLA.admit(others, running, full).admitted == []


def test_the_first_of_it_keeps_its_place() -> None:
    running = [*paced(3, ROOMY_MS), *background(1, State.READY)]
    coming = request(50, tpot_ms=ROOMY_MS)
    assert not FLOTILLA.may_take_place([coming], running, context(max_running=4))
    assert FLOTILLA.admit([coming], running, context(max_running=4)).admitted == []


def test_its_prompts_are_read_a_little_at_a_time_however_long_they_have_waited() -> None:
    """Where pieces save time and every further token would break an objective."""
    decoding = [request(1, State.DRAFTED, tpot_ms=6.0)]
    prompts = [request(100 + n, State.PREFILLING, prompt=200, arrived=-1e3, priority=5) for n in range(2)]
    few = context(cost=roofline(4))
    assert FLOTILLA.prefill(prompts, decoding, 1, [*decoding, *prompts], few) == [(prompts[0], LEAST_CHUNK)]
    ordinary = [request(100 + n, State.PREFILLING, prompt=200, arrived=-1e3) for n in range(2)]
    assert sum(n for _, n in FLOTILLA.prefill(ordinary, decoding, 1, [*decoding, *ordinary], few)) == 64


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("pieces_save", [False, True])
def test_a_little_of_each_call_is_its_own_however_many_prompts_there_are(
    pieces_save: bool, is_late: bool
) -> None:
    """Beside prompts that filled every call it held its place for nothing, for ever."""
    decoding = [request(1, State.DRAFTED, tpot_ms=100.0)]
    coming = NOW - 1e3 if is_late else NOW
    prompts = [request(10 + n, State.PREFILLING, prompt=200, arrived=coming, tpot_ms=100.0) for n in range(3)]
    behind = [request(100 + n, State.PREFILLING, prompt=200, arrived=-1e3, priority=5) for n in range(2)]
    now = context(cost=roofline(4) if pieces_save else cost())
    chunks = FLOTILLA.prefill([*behind, *prompts], decoding, 1, [*decoding, *prompts, *behind], now)
    assert dict(chunks)[behind[0]] == LEAST_CHUNK
    assert behind[1] not in dict(chunks)
    assert sum(tokens for _, tokens in chunks) == now.chunk_tokens
    nearly = request(200, State.PREFILLING, prompt=200, arrived=-1e3, priority=5, computed=197)
    chunks = FLOTILLA.prefill([nearly, *prompts], decoding, 1, [*decoding, *prompts, nearly], now)
    assert sum(tokens for _, tokens in chunks) == now.chunk_tokens


def test_steps_are_sent_ahead_without_those_who_sit_out() -> None:
    world = AheadWorld(1, "autoregressive")
    world.begin("first", "second", "third", priority=5, sampling=ends(90))
    # Of one alone an iteration takes 9 ms by the cost model, and of two 10.
    world.send(Submit(request_id="paced", prompt=[9] * 10, sampling=LONG, objective=Objective(tpot_ms=12.0)))
    while "paced" not in ids(world.calls[-1]):
        assert world.answer_one()
    num_calls = len(world.calls)
    while "paced" not in world.reason:
        assert world.answer_one()
    beside = [call for call in world.calls[num_calls:] if "paced" in ids(call)]
    assert all(ids(call) == {"paced", "first"} for call in beside[3:])
    assert sum(map(is_ahead, beside)) >= len(beside) - 3
    world.drain()
    world.check_ends()
    check_at_rest(world.core)
    assert world.core.totals.preemptions == 0


@examples(60)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_random_interruptions_change_no_text_beside_a_background(seed: int, data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(["autoregressive", "flotilla", "adaserve"]))
    world = AheadWorld(seed, policy, num_slots=300)
    interrupt(world, data, share_off=0.5, share_background=0.5)
