"""Our batching rule: pieces of prompts, where they save time, keep every objective; nobody waits long."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.admission import Room, victim
from cluster.batching.base import BatchContext
from cluster.batching.common import tokens_left
from cluster.batching.flotilla import LEAST_CHUNK, PATIENCE_TOKENS, PROMPT_PATIENCE_S
from cluster.batching.registry import make_rule
from cluster.batching.slack import MARGIN
from cluster.requests import Request, State
from tests.cluster.batch_states import NOW, cells, context, ids, of_state, request, requests_in, roofline
from tests.examples import examples

FLOTILLA = make_rule("flotilla")


def call_seconds(
    verifying: list[Request], num_rows: int, prompt: Request, chunk: int, c: BatchContext
) -> float:
    """The call with a chunk of one prompt in it, straight from the cost model's coefficients."""
    target = c.cost.profile.target
    seconds = target.delta + target.rho * (len(verifying) + (chunk > 0)) + target.gamma * (num_rows + chunk)
    seconds += target.gamma_knee * max(0.0, num_rows + chunk - target.knee_tokens)
    return seconds + target.alpha * sum(r.num_tokens for r in verifying)


def just_in_time_s(tpot_ms: float) -> float:
    """What is fixed of a call that keeps one request's objective, but not beside any prompt."""
    return (tpot_ms / MARGIN - 0.3) / 1e3


def is_kept(member: Request, seconds: float, c: BatchContext) -> bool:
    """Whether its mean time per token is within its objective after a step of `seconds` (with margin)."""
    tpot_ms = member.submit.objective.tpot_ms
    if tpot_ms is None:
        return True
    assert member.first_token_at is not None
    tokens = 1.0 + 4 * max(0.0, c.num_committed - 1.0) / (member.num_steps + 4)  # none accepted so far
    due = member.first_token_at + (len(member.output) - 1 + tokens) * tpot_ms / 1e3
    return c.now + MARGIN * seconds <= due + 1e-12


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Request], Request, BatchContext]:
    """Drafted requests, a prompt that has just arrived, and nobody else; some rows of a prompt are free."""
    limits = context(
        chunk_tokens=draw(st.sampled_from([16, 64])),
        num_committed=draw(st.sampled_from([1.0, 2.5])),
        cost=roofline(draw(st.sampled_from([18, 20]))),
    )
    verifying = [draw(requests_in(n, State.DRAFTED)) for n in range(draw(st.integers(1, 5)))]
    prompt = request(9, State.PREFILLING, prompt=draw(st.integers(9, 100)), arrived=NOW)
    return verifying, prompt, limits


@examples(300)
@given(call=calls())
def test_the_chunk_keeps_every_objective_that_some_chunk_keeps(
    call: tuple[list[Request], Request, BatchContext],
) -> None:
    verifying, prompt, limits = call
    num_rows = 2 * len(verifying)
    chunks = FLOTILLA.prefill([prompt], verifying, num_rows, [*verifying, prompt], limits)
    chunk = chunks[0][1] if chunks else 0
    most = min(limits.chunk_tokens, tokens_left(prompt))
    keepable = [
        m for m in verifying if is_kept(m, call_seconds(verifying, num_rows, prompt, 0, limits), limits)
    ]
    keeping = [
        size
        for size in range(most + 1)
        if all(is_kept(m, call_seconds(verifying, num_rows, prompt, size, limits), limits) for m in keepable)
    ]
    assert chunk in keeping
    if len(keepable) == len(verifying):  # nobody is behind, so nothing else speaks against the largest
        useful = [size for size in keeping if size >= min(LEAST_CHUNK, most)]
        assert chunk == max(useful, default=0)


def test_the_most_urgent_prompt_is_computed_first() -> None:
    verifying = [request(0, State.DRAFTED, tpot_ms=30.0)]
    early = request(1, State.PREFILLING, prompt=15, arrived=NOW - 0.5)
    due = request(2, State.PREFILLING, prompt=15, arrived=NOW - 0.1, ttft_ms=300.0)
    chunks = FLOTILLA.prefill([early, due], verifying, 2, [*verifying, early, due], context())
    assert chunks[0] == (due, 15)


def test_a_deadline_that_cannot_be_met_any_more_gives_way_to_one_that_can() -> None:
    late = request(1, arrived=NOW - 1.0, ttft_ms=900.0)
    due = request(2, arrived=NOW - 0.1, ttft_ms=900.0)
    assert ids(FLOTILLA.admit([late, due], [], context(max_running=1)).admitted) == ["r2"]


@pytest.mark.parametrize(
    ("tpot_ms", "ttft_ms", "patience_s"),
    [(8.0, None, PATIENCE_TOKENS * 8e-3), (8.0, 120.0, 0.012), (200.0, None, PROMPT_PATIENCE_S)],
)
def test_a_prompt_that_has_waited_is_computed_at_any_cost(
    tpot_ms: float, ttft_ms: float | None, patience_s: float
) -> None:
    """As long as some tokens of the objective it waits for, a share of its own, and never for long."""
    verifying = [request(0, State.DRAFTED, tpot_ms=tpot_ms, output=1, decoding_s=0.0)]
    prompt = request(1, State.PREFILLING, prompt=40, ttft_ms=ttft_ms)
    limits = context(num_committed=1.0, cost=roofline(10, just_in_time_s(tpot_ms)))
    for waited_s, chunks in ((patience_s - 0.01, []), (patience_s + 1e-6, [(prompt, 40)])):
        prompt.arrived = NOW - waited_s
        assert FLOTILLA.prefill([prompt], verifying, 1, [*verifying, prompt], limits) == chunks


@pytest.mark.parametrize(
    ("num_prompt", "num_free", "is_put_off"), [(40, 0, False), (40, 10, True), (8, 4, False)]
)
def test_a_prompt_waits_only_where_pieces_save_time(num_prompt: int, num_free: int, is_put_off: bool) -> None:
    """Not where every row costs as much, nor if it is too short to be cut."""
    verifying = [request(0, State.DRAFTED, tpot_ms=8.0, output=1, decoding_s=0.0)]
    prompt = request(1, State.PREFILLING, prompt=num_prompt, arrived=NOW)
    limits = context(num_committed=1.0, cost=roofline(num_free, just_in_time_s(8.0)))
    chunks = FLOTILLA.prefill([prompt], verifying, 1, [*verifying, prompt], limits)
    assert chunks == ([] if is_put_off else [(prompt, num_prompt)])


def test_a_gap_between_drafts_is_filled_and_no_more() -> None:
    """Also where pieces save nothing: trees come soon, of requests that can be on time."""
    drafting = request(0, State.DRAFTING, tpot_ms=40.0, output=1, decoding_s=0.0)
    prompt = request(1, State.PREFILLING, prompt=64, arrived=NOW)
    limits = context(overlaps=True, draft_left_s=0.02, num_committed=1.0)
    ((_, num_tokens),) = FLOTILLA.prefill([prompt], [], 0, [drafting, prompt], limits)
    assert 0.9 * 0.02 <= MARGIN * call_seconds([], 0, prompt, num_tokens, limits) <= 0.02


def test_who_waits_does_not_keep_others_waiting() -> None:
    """Behind a prompt of which nothing is read one that is too short to be cut is read."""
    verifying = [request(0, State.DRAFTED, tpot_ms=8.0, output=1, decoding_s=0.0)]
    long = request(1, State.PREFILLING, prompt=40, arrived=NOW)
    short = request(2, State.PREFILLING, prompt=8, arrived=NOW)
    limits = context(num_committed=1.0, cost=roofline(10, just_in_time_s(8.0)))
    chunks = FLOTILLA.prefill([long, short], verifying, 1, [*verifying, long, short], limits)
    assert chunks == [(short, 8)]


@pytest.mark.parametrize("rule", ["flotilla", "sarathi", "priority"])
def test_prompts_join_the_trees_rather_than_have_a_forward_before_them(rule: str) -> None:
    drafting, prompt = request(0, State.DRAFTING), request(1, State.PREFILLING, prompt=40)
    prefill = make_rule(rule).prefill
    assert prefill([prompt], [], 0, [drafting, prompt], context()) == []
    drafting.state = State.DRAFTED
    assert prefill([prompt], [drafting], 2, [drafting, prompt], context()) == [(prompt, 40)]


@examples(100)
@given(cell=cells(), data=st.data())
def test_without_objectives_it_is_sarathi(
    cell: tuple[list[Request], list[Request], BatchContext], data: st.DataObject
) -> None:
    _, running, limits = cell
    sarathi = make_rule("sarathi")
    members = [
        request(n, r.state, prompt=r.num_tokens, arrived=n, served_at=r.last_served_at)
        for n, r in enumerate(running)
    ]
    waiting = [request(100 + n, arrived=NOW + n) for n in range(data.draw(st.integers(0, 6)))]
    prefilling, drafted = of_state(members, State.PREFILLING), of_state(members, State.DRAFTED)
    ready = of_state(members, State.READY)
    assert FLOTILLA.admit(waiting, members, limits) == sarathi.admit(waiting, members, limits)
    assert FLOTILLA.decode(ready, members, limits) == sarathi.decode(ready, members, limits)
    for verifying in ([], drafted):
        ours = FLOTILLA.prefill(prefilling, verifying, len(verifying), members, limits)
        assert ours == sarathi.prefill(prefilling, verifying, len(verifying), members, limits)


@examples(100)
@given(cell=cells())
def test_nobody_waits_for_the_sake_of_those_who_run(
    cell: tuple[list[Request], list[Request], BatchContext],
) -> None:
    """The queue is the one that a lack of room makes, whatever the objectives; all who are ready decode."""
    waiting, running, limits = cell
    admission = FLOTILLA.admit(waiting, running, limits)
    room = Room.beside(running, limits.free_slots, limits.max_running)
    for member in admission.preempted:
        room.give_back(member)
    for member in admission.admitted:
        room.take(member)
    left = [member for member in waiting if member not in admission.admitted]
    assert not left or not all(room.takes(member) for member in left)
    ready = of_state(running, State.READY)
    assert FLOTILLA.decode(ready, running, limits) == ready


def test_best_effort_gives_way_once_to_a_first_token_about_to_be_late() -> None:
    best_effort = [request(n, State.READY) for n in range(2)]
    due = request(5, prompt=20, arrived=NOW - 0.1, ttft_ms=140.0)
    limits = context(max_running=2)
    admission = FLOTILLA.admit([due], best_effort, limits)
    assert (ids(admission.admitted), ids(admission.preempted)) == (["r5"], ["r1"])
    for member in best_effort:
        member.num_preemptions = 1
    assert FLOTILLA.admit([due], best_effort, limits).admitted == []


@pytest.mark.parametrize(("tenant", "preempted"), [("a", []), ("b", ["r1"])])
def test_a_named_priority_keeps_a_place_from_the_same_key_alone(tenant: str, preempted: list[str]) -> None:
    """Between keys it is a client's own word, and what counts is the tier's."""
    first = request(0, State.READY, tenant="a", tier="first", priority=-1)
    named = request(1, State.READY, tenant="a", priority=-1000)
    due = request(5, prompt=20, arrived=NOW - 0.1, ttft_ms=140.0, tenant=tenant)
    limits = context(max_running=2, tier_priorities={"first": -1})
    assert ids(FLOTILLA.admit([due], [first, named], limits).preempted) == preempted


def test_who_gives_way_of_several_keys_is_said_by_their_tiers() -> None:
    here = [
        request(0, State.READY, tenant="a", tier="last", priority=5),
        request(1, State.READY, tenant="a", priority=-1000),
        request(2, State.READY, tenant="c", priority=1000),
        request(3, State.READY, tenant="c"),
    ]
    due = request(9, prompt=20, arrived=NOW - 0.1, ttft_ms=140.0, tenant="b")
    limits = context(max_running=4, tier_priorities={"last": 5})
    gone = [
        FLOTILLA.admit([due], here[at:], msgspec.structs.replace(limits, max_running=4 - at)).preempted
        for at in range(3)
    ]
    assert list(map(ids, gone)) == [["r0"], ["r2"], ["r2"]]


@pytest.mark.parametrize("waited_s", [0.0, 31.0, 61.0])
def test_waiting_lifts_a_request_over_more_important_ones(waited_s: float) -> None:
    unimportant = request(1, arrived=NOW - waited_s, priority=1)
    important = request(2, arrived=NOW, priority=0)
    admitted = FLOTILLA.admit([important, unimportant], [], context(max_running=1)).admitted
    assert ids(admitted) == (["r2"] if waited_s == 0.0 else ["r1"])


@pytest.mark.parametrize("lost", [False, True])
def test_running_is_no_waiting_for_who_gave_way_to_others(lost: bool) -> None:
    """It stood before all who were due at once, without room for itself: nobody could be made room for."""
    here, gone = request(0, State.READY, prompt=100), request(1, State.READY, prompt=100, arrived=NOW - 45)
    gone.begun_at, gone.last_served_at = NOW - 44, NOW - 0.5
    gone.preempt(lost=lost)
    gone.num_preemptions = 1
    due = request(5, prompt=20, arrived=NOW - 0.1, ttft_ms=170.0)
    admission = FLOTILLA.admit([gone, due], [here], context(free_slots=30))
    if lost:  # it had its place before them, and through no want of room has none
        assert admission.admitted == []
        return
    assert (ids(admission.admitted), ids(admission.preempted)) == (["r5"], ["r0"])
    # What it has waited counts: a second and a half so far.
    late = context(free_slots=500, now=NOW + 29, max_running=2)
    new = request(6, arrived=NOW + 29 - 0.1, ttft_ms=170.0)
    assert ids(FLOTILLA.admit([new, gone], [here], late).admitted)[0] == "r1"


def test_for_want_of_slots_best_effort_gives_way_before_a_first_token_that_is_due() -> None:
    best_effort = request(0, State.READY, arrived=NOW - 5)
    due = request(1, State.PREFILLING, prompt=100, computed=90, ttft_ms=150.0, tpot_ms=30.0)
    ahead = request(2, State.READY, tpot_ms=50.0, output=9)
    assert victim([best_effort, due, ahead], NOW, 0.02) is best_effort
    assert victim([due, ahead], NOW, 0.02) is ahead
