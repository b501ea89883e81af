"""What every batching rule keeps to on any state of a cell, and what each is named for."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.admission import GROWTH_RESERVE, slack_s
from cluster.batching.base import BatchContext, BatchingRule
from cluster.batching.common import IN_CALL, batch_limit, tokens_left
from cluster.batching.priority import urgency
from cluster.batching.registry import BATCHING_RULES, make_rule
from cluster.batching.sep_pipe import pipeline
from cluster.cost_model import VERIFY_DRAFTED, CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.requests import Request, State
from tests.cluster.batch_states import cells, context, ids, of_state, request, requests_in
from tests.examples import examples

Cell = tuple[list[Request], list[Request], BatchContext]
CHUNKED = ("flotilla", "priority", "sarathi")
each_rule = pytest.mark.parametrize("name", sorted(BATCHING_RULES))


def answers(rule: BatchingRule, cell: Cell) -> tuple[list[list[str]], list[tuple[str, int]]]:
    """Everything a rule says about a cell, as data."""
    waiting, running, limits = cell
    drafted, prefilling = of_state(running, State.DRAFTED), of_state(running, State.PREFILLING)
    admission = rule.admit(waiting, running, limits)
    decoding = rule.decode(of_state(running, State.READY), running, limits)
    verifying = rule.verify(drafted, prefilling, running)
    chunks = rule.prefill(prefilling, verifying, 2 * len(verifying), running, limits)
    lists = [admission.admitted, admission.preempted, decoding, verifying]
    return [ids(chosen) for chosen in lists], [(r.request_id, tokens) for r, tokens in chunks]


@each_rule
@examples(40)
@given(cell=cells())
def test_answers_depend_on_the_arguments_alone_and_change_nothing(name: str, cell: Cell) -> None:
    before = [copy.deepcopy(r).submit for r in (*cell[0], *cell[1])]
    books = [(r.state, r.num_computed, len(r.output), r.last_served_at) for r in (*cell[0], *cell[1])]
    rule = make_rule(name)
    first = answers(rule, cell)
    assert answers(rule, cell) == first
    assert answers(make_rule(name), copy.deepcopy(cell)) == first
    assert [r.submit for r in (*cell[0], *cell[1])] == before
    assert [(r.state, r.num_computed, len(r.output), r.last_served_at) for r in (*cell[0], *cell[1])] == books


@each_rule
@examples(40)
@given(cell=cells((*IN_CALL, State.READY, State.PREFILLING)))
def test_admission_stays_within_places_and_slots(name: str, cell: Cell) -> None:
    waiting, running, limits = cell
    admission = make_rule(name).admit(waiting, running, limits)
    admitted, preempted = admission.admitted, admission.preempted
    assert len(set(ids(admitted))) == len(admitted)
    assert set(ids(admitted)) <= set(ids(waiting))
    assert set(ids(preempted)) <= set(ids(running))
    assert not any(victim.state in IN_CALL for victim in preempted), "taken from under the target's hands"
    kept = [r for r in running if r not in preempted]
    assert len(kept) + len(admitted) <= limits.max_running or not admitted
    needed = sum(r.num_tokens + GROWTH_RESERVE for r in (admitted if running else admitted[1:]))
    if admitted and needed:
        for member in kept:
            needed += GROWTH_RESERVE
            if member.state in (State.PREFILLING, State.PREFILL_SENT):
                needed += member.num_tokens - member.num_computed
        if not running:
            needed += admitted[0].num_tokens + GROWTH_RESERVE
        assert needed <= limits.free_slots + sum(victim.num_computed for victim in preempted)


@each_rule
@examples(40)
@given(cell=cells())
def test_nobody_idles_with_work_at_hand(name: str, cell: Cell) -> None:
    waiting, running, limits = cell
    rule = make_rule(name)
    if waiting:
        assert rule.admit(waiting, [], limits).admitted
    ready, drafting = of_state(running, State.READY), of_state(running, State.DRAFTING)
    drafted, prefilling = of_state(running, State.DRAFTED), of_state(running, State.PREFILLING)
    decoding = rule.decode(ready, running, limits)
    assert set(ids(decoding)) <= set(ids(ready))
    assert len(set(ids(decoding))) == len(decoding)
    if ready and not drafting and not drafted:
        assert decoding
    verifying = rule.verify(drafted, prefilling, running)
    assert set(ids(verifying)) <= set(ids(drafted))
    chunks = rule.prefill(prefilling, verifying, 2 * len(verifying), running, limits)
    if (drafted or prefilling) and not drafting and not decoding:
        assert verifying or chunks


@each_rule
@examples(40)
@given(cell=cells())
def test_prefill_stays_within_its_budget(name: str, cell: Cell) -> None:
    _, running, limits = cell
    rule = make_rule(name)
    prefilling = of_state(running, State.PREFILLING)
    verifying = rule.verify(of_state(running, State.DRAFTED), prefilling, running)
    chunks = rule.prefill(prefilling, verifying, 2 * len(verifying), running, limits)
    assert len({r.request_id for r, _ in chunks}) == len(chunks)
    assert all(r in prefilling and 1 <= tokens <= tokens_left(r) for r, tokens in chunks)
    total = sum(tokens for _, tokens in chunks)
    if name in CHUNKED:
        assert total <= limits.chunk_tokens
    else:
        assert all(tokens == tokens_left(r) for r, tokens in chunks)
        assert total <= limits.whole_tokens or len(chunks) == 1


@examples(40)
@given(cell=cells())
def test_sarathi_never_delays_a_decode(cell: Cell) -> None:
    _, running, limits = cell
    rule = make_rule("sarathi")
    ready, drafted = of_state(running, State.READY), of_state(running, State.DRAFTED)
    assert rule.decode(ready, running, limits) == ready
    assert rule.verify(drafted, of_state(running, State.PREFILLING), running) == drafted


@examples(40)
@given(cell=cells())
def test_fcfs_takes_the_first_to_come_and_prompts_before_decodes(cell: Cell) -> None:
    waiting, running, limits = cell
    rule = make_rule("fcfs")
    admitted = rule.admit(waiting, running, limits).admitted
    assert admitted == waiting[: len(admitted)]
    prefilling = of_state(running, State.PREFILLING)
    if prefilling:
        assert rule.verify(of_state(running, State.DRAFTED), prefilling, running) == []
        first = min(prefilling, key=lambda r: (r.submit.priority, r.order))
        assert rule.prefill(prefilling, [], 0, running, limits)[0][0] is first


@examples(40)
@given(cell=cells((State.READY, State.DRAFTED)))
def test_who_is_held_back_is_less_pressed_than_who_decodes(cell: Cell) -> None:
    _, running, limits = cell
    ready = of_state(running, State.READY)
    keys = {
        "priority": urgency,
        "stta": lambda r: slack_s(r, limits.now, limits.step_s),
        "fcfs-slo": lambda r: (r.submit.priority, r.order),
    }
    for name, key in keys.items():
        decoding = make_rule(name).decode(ready, running, limits)
        held = [r for r in ready if r not in decoding]
        if decoding and held:
            assert max(map(key, decoding)) <= min(map(key, held))
        if held:
            assert len(decoding) + len(of_state(running, State.DRAFTED)) >= batch_limit(running, limits)


@examples(40)
@given(cell=cells((State.READY, *IN_CALL)))
def test_priority_preempts_for_more_urgent_requests_only(cell: Cell) -> None:
    waiting, running, limits = cell
    admission = make_rule("priority").admit(waiting, running, limits)
    if admission.preempted:
        assert min(map(urgency, admission.preempted)) > min(map(urgency, admission.admitted))


@examples(40)
@given(cell=cells())
def test_separate_pipelines_share_no_call(cell: Cell) -> None:
    _, running, limits = cell
    rule = make_rule("sep-pipe")
    prefilling = of_state(running, State.PREFILLING)
    verifying = rule.verify(of_state(running, State.DRAFTED), prefilling, running)
    chunks = rule.prefill(prefilling, verifying, 2 * len(verifying), running, limits)
    assert len({pipeline(r) for r in (*verifying, *(r for r, _ in chunks))}) <= 1


def test_separate_pipelines_take_turns() -> None:
    running = [
        request(0, State.DRAFTED, tier="a", served_at=9.8),
        request(1, State.DRAFTED, tier="a", served_at=9.9),
        request(2, State.DRAFTED, tier="b", served_at=9.85),
    ]
    assert ids(make_rule("sep-pipe").verify(running, [], running)) == ["r2"]
    running[2].last_served_at = 9.95
    assert ids(make_rule("sep-pipe").verify(running, [], running)) == ["r0", "r1"]


@examples(40)
@given(data=st.data(), num_rows=st.sampled_from([1.0, 3.5]), tokens=st.sampled_from([1.0, 2.0]))
def test_the_batch_limit_is_the_largest_batch_that_keeps_the_strictest_objective(
    data: st.DataObject, num_rows: float, tokens: float
) -> None:
    running = [data.draw(requests_in(number, State.READY)) for number in range(data.draw(st.integers(1, 6)))]
    limits = context(num_rows=num_rows, num_committed=tokens)
    objectives = [r.submit.objective.tpot_ms for r in running if r.submit.objective.tpot_ms is not None]
    mean_context = sum(r.num_tokens for r in running) / len(running)

    def keeps(n: int) -> bool:
        forward_s = limits.cost.verify_seconds(n, round(n * num_rows), round(n * mean_context))
        return limits.beside_s + forward_s <= min(objectives) / 1e3 * tokens

    fitting = [n for n in range(1, limits.max_running + 1) if not objectives or keeps(n)]
    assert batch_limit(running, limits) == max(fitting, default=1)


@pytest.mark.parametrize(("num_rows", "limit"), [(1.0, 8), (2.0, 2)])
def test_the_batch_limit_knows_that_forwards_after_drafting_take_longer(num_rows: float, limit: int) -> None:
    """By hand: a row takes 1 ms, twice that after drafting, and a forward may take 8 ms."""
    profile = CostProfile(target=LinearCost(gamma=1e-3))
    measured = CostModel.corrected(profile, {VERIFY_DRAFTED: 2.0}, {})
    limits = context(cost=measured, num_rows=num_rows, num_committed=1.0, beside_s=0.0)
    assert batch_limit([request(0, State.READY, tpot_ms=8.001)], limits) == limit


def test_an_unknown_rule_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown batching rule `lifo`; known: fcfs, fcfs-slo, flotilla"):
        make_rule("lifo")
