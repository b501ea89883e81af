"""The fault search over the scheduler core: nothing in the real one, every fault in broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import chaos
from benchmarks.chaos_schedule import FAULTS, Schedule, drawn, names_of
from benchmarks.chaos_world import ChaosWorld
from cluster.core import SchedulerCore
from deployments.cli import app
from tests.chaos.broken_cores import (
    BROKEN,
    EndsTwice,
    LeaksSlots,
    LosesToken,
    StarvesTheLast,
    WaitsForever,
)

# Of which those of a usual run are half.
SEEDS = range(80)
# Half as many as usual, which take half the time: every fault of `BROKEN` shows in the first 80 of such, too.
MOST_OPERATIONS = 75
# Every fault shows within so many schedules; of those that show seldom, in which one they did last.
MOST_TRIED = 120
SELDOM: dict[type[SchedulerCore], int] = {
    WaitsForever: 37,
    StarvesTheLast: 65,
}


@pytest.mark.parametrize("seeds", [SEEDS[40:], pytest.param(SEEDS, marks=pytest.mark.thorough)])
def test_random_schedules_lose_nothing(seeds: range) -> None:
    happened, failures = chaos.search(seeds, most_operations=MOST_OPERATIONS)
    for failure in failures[:1]:
        short = chaos.shortened(failure)
        pytest.fail(f"{len(failures)} failed; {short.kind}: {short.message}\n\n{short.schedule.script()}")
    # A search that tries nothing finds nothing.
    least = len(seeds) // 16
    for name in ("preemptions", "deferred", "draft timeouts", "corrupt drafts", "resubmissions", "tokens"):
        assert happened[name] >= least, name
    assert happened["calls ahead"] >= 100
    for name in ("calls held back", "drafts planned ahead"):
        assert happened[name] >= least, name
    for name in ("targets lost", "drafters lost", "schedulers lost", "cells drained", "policy changes"):
        assert happened[name] >= least, name
    tried = {name for seed in seeds for name in names_of(drawn(seed, MOST_OPERATIONS).operations)}
    assert tried >= FAULTS.keys()


@pytest.mark.parametrize("broken", BROKEN, ids=lambda core: core.__name__)
def test_every_fault_is_found(broken: type[SchedulerCore]) -> None:
    first = SELDOM.get(broken, 0)
    for seed in (*range(first, MOST_TRIED), *range(first)):
        _, failure = chaos.attempt(drawn(seed, MOST_OPERATIONS), broken)
        if failure is not None:
            break
    assert failure is not None, f"{broken.__name__} was not found"
    # By what the search looks for; a broken core that crashes would be found in any case.
    assert failure.kind.startswith(("Violation in ", "AssertionError in invariants.py, ")), failure
    _, real = chaos.attempt(failure.schedule)
    assert real is None, "the fault is not the broken core's"


@pytest.mark.parametrize(
    "broken",
    [LosesToken, *(pytest.param(one, marks=pytest.mark.thorough) for one in (LeaksSlots, EndsTwice))],
    ids=lambda core: core.__name__,
)
def test_what_fails_becomes_short(broken: type[SchedulerCore]) -> None:
    _, failures = chaos.search(range(10), broken)
    failure = max(failures, key=lambda one: len(one.schedule.operations))
    assert len(failure.schedule.operations) > 50
    short = chaos.shortened(failure, broken)
    assert len(short.schedule.operations) <= 5
    _, again = chaos.attempt(short.schedule, broken)
    assert again is not None
    assert again.kind == failure.kind


def test_a_schedule_repeats_exactly() -> None:
    schedule = drawn(17)
    assert ChaosWorld.run(schedule) == ChaosWorld.run(schedule)


def test_the_script_of_a_schedule_is_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Schedule] = []
    monkeypatch.setattr(ChaosWorld, "run", ran.append)
    for seed in range(20):
        exec(drawn(seed).script(), {})
    assert ran == [drawn(seed) for seed in range(20)]


def test_the_command_reports_figures(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    command = ["bench", "chaos", "--schedules", "3", "--processes", "1", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "3 schedules" in result.output
    record = json.loads(file.read_text())
    assert (record["schedules"], record["failed"], record["failures"]) == (3, 0, [])
    assert record["happened"]["requests"] > 6


def test_the_command_prints_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ChaosWorld.run
    monkeypatch.setattr(ChaosWorld, "run", lambda schedule, *_: run(schedule, BROKEN[0]))
    result = CliRunner().invoke(app, ["bench", "chaos", "--schedules", "6", "--processes", "1"])
    assert result.exit_code == 1
    assert "ChaosWorld.run(Schedule(settings, operations))" in result.output
