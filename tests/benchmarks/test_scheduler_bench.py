"""`flotilla bench scheduler`: what it runs is the real core in a steady state."""

from benchmarks import refusal_cost, scheduler_cost
from benchmarks.scheduler_cost import REST, ScriptedCell, measure


def test_as_many_requests_run_as_asked_and_all_of_them_draft() -> None:
    cell = ScriptedCell("flotilla", "flotilla", 8, seed=0)
    cell.run(120)
    assert len(cell.core.running) in (7, 8)  # one may just have ended
    assert cell.core.totals.draft_timeouts == 0
    assert cell.core.totals.verified_tokens > 100 * 8


def test_runs_of_one_seed_make_the_same_decisions() -> None:
    totals = []
    for _ in range(2):
        cell = ScriptedCell("adaserve", "sarathi", 4, seed=3)
        cell.run(40)
        totals.append(cell.core.totals)
    assert totals[0] == totals[1]


def test_phases_are_parts_of_the_step_and_plain_decoding_drafts_nothing() -> None:
    before = scheduler_cost.DrafterPool.assign
    drafted = measure("flotilla", 2, steps=10, repeats=1)
    plain = measure("autoregressive", 2, steps=10, repeats=1)
    assert scheduler_cost.DrafterPool.assign is before  # what was wrapped is itself again
    assert drafted.drafted > 1.0
    assert plain.drafted == 0.0
    assert plain.committed == 1.0 < drafted.committed
    assert {"policy plans", "policy selects", "batching rule", REST} <= drafted.phases.keys()
    assert all(microseconds >= 0.0 for microseconds in drafted.phases.values())


def test_an_overloaded_cell_refuses_most_and_is_timed_by_what_it_refuses() -> None:
    found = refusal_cost.measure(4, 16, refusals=40, repeats=2, seed=0)
    assert found.refused == 60
    assert 0.5 * found.asked < found.refused < found.asked
    assert found.milliseconds > 0.0
    assert found.median_ms > 0.0
