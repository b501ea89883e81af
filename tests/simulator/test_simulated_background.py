"""A backlog that nobody is in a hurry for has the time that others leave, and hardly any of theirs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.objectives import Limit, SloSpec
from cluster.totals import Totals
from simulator import hardware, systems, workloads
from simulator.background import PRIORITY, in_background
from simulator.cli import app
from simulator.metrics import BACKGROUND, Outcome, RunResult
from simulator.run import Options, simulate

RATE, SECONDS = 6.0, 5.0
SLOS = {"code": SloSpec(tpot=Limit(1.2, relative=True)), "chat": SloSpec(tpot=Limit(50.0))}


def served(name: str, num_background: int) -> RunResult:
    profile = hardware.load("llama-70b-a100")
    shapes = workloads.of_lengths(round(RATE * SECONDS), 1, {"code": (100, 60), "chat": (40, 60)})
    requests = workloads.arrive(shapes, profile.baseline_s(), rate=RATE, slos=SLOS, seed=1)
    backlog = in_background([shapes[i % len(shapes)] for i in range(num_background)], 1)
    system = systems.parse(name, systems.Bounds(max_running=160))
    return simulate(profile, system, requests, Options(seed=1), background=backlog)


def test_those_with_objectives_keep_them_beside_a_backlog_that_had_filled_the_cell() -> None:
    alone, beside = served("flotilla", 0), served("flotilla", 200)
    assert alone.all.attainment > 0.95
    assert beside.all.attainment > alone.all.attainment - 0.15
    assert beside.classes[BACKGROUND].throughput_tokens_s > beside.all.throughput_tokens_s / 2
    assert beside.all.num_requests == alone.all.num_requests
    # Who lets everybody in keeps hardly any.
    assert served("adaserve", 200).all.attainment < 0.5


def test_it_is_there_from_the_start_without_objectives() -> None:
    shapes = workloads.synthetic(3, 1)
    backlog = in_background(shapes, 2)
    assert [(one.arrival_s, one.priority, one.objective.tpot_ms) for one in backlog] == [
        (0.0, PRIORITY, None)
    ] * 3
    assert [one.num_prompt for one in backlog] == [shape.num_prompt for shape in shapes]
    assert len({one.seed for one in [*backlog, *in_background(shapes, 3)]}) == 6


def test_what_ends_after_the_last_answer_is_of_none_of_the_seconds_counted() -> None:
    def ended(at_s: float) -> Outcome:
        return Outcome(kind="code", attained=True, num_output=10, num_steps=10, ended_s=at_s)

    result = RunResult.of("x", [ended(1.0), ended(5.0)], Totals(), 0, [ended(2.0), ended(5.0), ended(5.9)])
    assert result.simulated_s == 5.0
    assert result.classes[BACKGROUND].num_requests == 2
    assert result.classes[BACKGROUND].throughput_tokens_s == pytest.approx(20 / 5.0)


def test_the_command_reports_it_apart_and_does_not_wait_for_it() -> None:
    lengths = ["--lengths", "code=60:60,chat=40:60", "--slo", "*:tpot=40"]
    asked = ["--rate", "4", "--seconds", "3", "--background", "150", *lengths, "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["runs"]
    assert run["classes"]["all"]["num_requests"] == 12
    assert 0 < run["classes"]["background"]["num_requests"] < 150
    assert run["num_unfinished"] == 0


@pytest.mark.parametrize("others", [["--at-once", "8"]])
def test_in_a_full_loop_there_is_none(others: list[str]) -> None:
    result = CliRunner().invoke(app, ["--background", "5", *others])
    assert result.exit_code == 2
    assert "nobody is in a hurry" in result.output
