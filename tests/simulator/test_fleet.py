"""Fleets of simulated cells: every request ends, processes change nothing, large is near detailed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cluster.stream_messages import Objective, Submit
from deployments.cell_router import CellRouter, _draw
from engine.sampling_params import SamplingParams
from simulator import hardware
from simulator.fleet import scenario as scenarios
from simulator.fleet.arrivals import Requests
from simulator.fleet.cells import FleetCell, Group, cell_system
from simulator.fleet.cli import app
from simulator.fleet.reports import COLUMN, NAMES, as_load
from simulator.fleet.roster import Changes, Roster, Stage
from simulator.fleet.routing import alike_cells
from simulator.fleet.run import FleetResult, run_detailed, run_large
from simulator.fleet.scenario import Scenario
from simulator.fleet.surface import Surface, measure, requests_that_fit
from simulator.fleet.surface_cells import SurfaceCells
from simulator.run import Options
from tests.simulator.sim_requests import one_request

SMALL = Scenario.model_validate(
    {
        "name": "small",
        "profile": "llama-8b-h100",
        "system": "sarathi",
        "max_running": 8,
        "arrivals": {"rate": 9.0, "seconds": 12.0, "swing": 0.4},
        "cells": {
            "min": 2,
            "max": 6,
            "max_step": 2,
            "upscale_delay_s": 1.0,
            "downscale_delay_s": 3.0,
            "target_queue_ms": 100.0,
        },
        "initial": 3,
        "start_up_s": 2.0,
        "mean_hours_between_losses": 0.01,
        "seed": 3,
    }
)


@cache
def surface() -> Surface:
    return measure(SMALL, num_requests=12)


@cache
def detailed(processes: int) -> FleetResult:
    return run_detailed(SMALL, processes)


@cache
def large() -> FleetResult:
    return run_large(SMALL, surface())


@pytest.mark.thorough
def test_processes_do_not_change_what_happens() -> None:
    assert without_wall(detailed(1)) == without_wall(detailed(2))


def without_wall(result: FleetResult) -> str:
    return repr(result).split("wall_s=")[0]


@pytest.mark.parametrize("is_detailed", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_every_request_ends_although_cells_are_lost_and_removed(*, is_detailed: bool) -> None:
    result = detailed(1) if is_detailed else large()
    assert result.num_lost > 0
    assert result.num_moved > 0
    assert result.decisions
    assert result.all.num_requests > 100
    assert result.all.num_unfinished == 0
    assert result.all.num_refused == 0


def test_large_fleets_are_determined_by_their_seed() -> None:
    one, other = large(), run_large(SMALL, surface())
    assert without_wall(one) == without_wall(other)
    changed = run_large(SMALL.model_copy(update={"seed": 4}), surface())
    assert without_wall(changed) != without_wall(one)


def test_response_surfaces_come_near_the_scheduler_that_serves() -> None:
    near, true = large(), detailed(1)
    assert near.all.num_requests == true.all.num_requests
    assert near.all.attainment == pytest.approx(true.all.attainment, abs=0.1)
    assert near.gpu_hours == pytest.approx(true.gpu_hours, rel=0.15)
    assert near.all.tokens_per_s == pytest.approx(true.all.tokens_per_s, rel=0.01)
    assert near.all.tpot_ms[0] == pytest.approx(true.all.tpot_ms[0], rel=0.15)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.floats(0, 2),
            st.floats(0.001, 0.1),
            st.floats(1e-5, 1e-3),
            st.integers(0, 900),
        ),
        min_size=2,
        max_size=9,
    ),
    st.integers(1, 600),
    st.one_of(st.none(), st.floats(5, 3000)),
    st.one_of(st.none(), st.floats(1, 100)),
    st.text("abc", min_size=1),
)
def test_many_are_routed_as_one_is(
    cells: list[tuple[int, float, float, float, int]],
    num_prompt: int,
    ttft_ms: float | None,
    tpot_ms: float | None,
    name: str,
) -> None:
    """The set that cells are drawn from, and the choice among the two that the router's hash draws."""
    objective = Objective(ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    reports = np.zeros((len(cells), len(NAMES)))
    for index, (running, queue_s, tpot_s, per_token_s, _) in enumerate(cells):
        reports[index, COLUMN["running"]], reports[index, COLUMN["queue_s"]] = running, queue_s
        reports[index, COLUMN["tpot_s"]], reports[index, COLUMN["step_s"]] = tpot_s, 0.03
        reports[index, COLUMN["prefill_s_per_token"]] = per_token_s
    sent = np.array([[float(one[4]) for one in cells]])
    loads = [as_load(index, reports[index], 0, one[4]) for index, one in enumerate(cells)]
    request = Submit(
        request_id=name, prompt=list(range(num_prompt)), sampling=SamplingParams(), objective=objective
    )
    alike = np.flatnonzero(alike_cells(objective, float(num_prompt), reports, sent)[0]).tolist()
    drawn = sorted(alike, key=lambda cell: _draw(name, str(cell)))[:2]
    expected = min(drawn, key=lambda cell: cells[cell][0])
    assert CellRouter().choose(request, loads) == str(expected)


def test_a_roster_pays_from_the_asking_to_the_end() -> None:
    changed = {"mean_hours_between_losses": None, "start_up_spread": 0.0}
    roster = Roster(SMALL.model_copy(update=changed))
    empty = np.zeros(roster.num_places, np.bool_)
    assert len(roster.advance(0.0, 0.25, empty).opened) == 3
    roster.want(5, 10.0, Changes())
    assert roster.advance(11.9, 0.25, empty).opened == []
    assert len(roster.advance(12.0, 0.25, empty).opened) == 2
    changes = Changes()
    roster.want(4, 20.0, changes)
    assert changes.draining == [4], "the last that came goes first"
    assert roster.advance(29.9, 0.25, empty).closed == []
    assert roster.advance(30.0, 0.25, empty).closed == [4]
    assert roster.count(Stage.READY) == 4
    assert roster.cell_hours(40.0) * 3600 == pytest.approx(3 * 40 + 30 + 20)


def test_a_cell_waits_for_a_place_while_many_drain() -> None:
    """Cells that drained for longer than others took to come left none, and the run ended in a traceback."""
    changed = {"mean_hours_between_losses": None, "start_up_s": 0.0}
    cells = SMALL.cells.model_copy(update={"drain_timeout_s": 600.0})
    roster = Roster(SMALL.model_copy(update={**changed, "cells": cells}))
    empty = np.zeros(roster.num_places, np.bool_)
    for second in range(0, 40, 4):
        for after, number in ((0, 6), (2, 2)):
            roster.want(number, float(second + after), Changes())
            roster.advance(second + after + 1.0, 1.0, empty)
    assert (roster.count(Stage.DRAINING), roster.count(Stage.READY)) == (10, 2)
    roster.want(6, 50.0, Changes())
    assert roster.count(Stage.STARTING) == 0
    roster.advance(51.0, 1.0, np.ones(roster.num_places, np.bool_))
    assert (roster.count(Stage.DRAINING), roster.count(Stage.STARTING)) == (0, 4)


def test_a_request_that_waits_again_keeps_its_tokens_when_its_cell_is_removed() -> None:
    """Who had begun and was preempted was given back without tokens, as if nothing had come yet."""
    profile = msgspec.structs.replace(hardware.load("llama-8b-h100"), num_slots=900)
    group = Group(profile, cell_system("sarathi", 8, 64), seed=0)
    group.open([0], 0.0)
    group.advance([(0, replace(one_request(n, 200), num_prompt=100, arrival_s=0.0)) for n in range(8)], 0.25)
    taken = {name: (tokens, first) for name, tokens, first in group.drain([0])}
    tokens, first_at = taken["r0"]
    assert tokens > 0
    assert first_at is not None
    assert taken["r7"] == (0, None)


@pytest.mark.thorough
def test_cells_are_measured_whose_context_is_shorter_than_some_prompts() -> None:
    """They refuse those; the next request came only where one ended, so that the measurement never did."""
    short = SMALL.model_copy(update={"profile": "demo-2-cores"})
    measured = measure(short.model_copy(update={"max_running": 2}), num_requests=60)
    assert measured.max_running == 2
    profile = hardware.load("demo-2-cores")
    assert requests_that_fit(short, 500, 0).prompt.max() < profile.max_tokens


def test_a_cell_reads_prompts_one_after_the_other() -> None:
    held = surface()
    cells = SurfaceCells(held, [Objective()] * 3, 2, max_waiting=1)
    cells.open([0, 1], 0.0)
    count = held.max_running + 2
    ints = np.zeros(count, np.int64)
    requests = Requests(
        number=np.arange(count),
        kind=ints,
        rank=np.full(count, 0.5),
        arrived=np.zeros(count),
        prompt=np.full(count, 1000),
        output=np.ones(count, np.int64),
        done=ints,
        first_at=np.full(count, np.nan),
        front_end=ints,
        tries=ints,
    )
    cells.submit(requests, ints, 0.0)
    reports = cells.reports(with_objectives=True)
    assert reports[0, COLUMN["running"]] == held.max_running
    assert reports[0, COLUMN["waiting"]] == 1
    ended, refused = cells.advance(100.0)
    assert len(refused) == 1, "one waits, one finds the queue full"
    # A TypeError, where all that ran had ended at once and somebody waited.
    assert cells.reports(with_objectives=True)[0, [COLUMN["running"], COLUMN["waiting"]]].tolist() == [0, 1]
    takes_s = 1000 * held.chunk_s[1 : held.max_running + 1]
    firsts = np.sort(ended.first_at)
    assert len(firsts) == held.max_running
    assert np.diff(firsts).min() > 0.9 * takes_s.min()
    assert cells.close([0]).number.size == 1


def test_the_command_reports_and_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.fleet.cli.measure", lambda *_: surface())
    file = tmp_path / "small.yaml"
    file.write_text(SMALL.model_dump_json())
    arguments = [str(file), "--scaling", "flotilla,fixed=4", "--router", "flotilla,round-robin"]
    written = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "plot")}
    written["plot"] = tmp_path / "images" / "out.png"
    written["plot"].parent.mkdir()
    options = [part for name, path in written.items() for part in (f"--{name}", str(path))]
    run = CliRunner().invoke(app, [*arguments, *options, "--processes", "1"])
    assert run.exit_code == 0, run.output
    held = json.loads(written["json"].read_text())
    assert [(one["scaling"], one["router"]) for one in held] == [
        ("flotilla", "flotilla"),
        ("fixed", "flotilla"),
        ("flotilla", "round-robin"),
    ]
    assert held[1]["decisions"] == []
    assert "fixed at 4" in written["markdown"].read_text()
    assert "(images/out.png)" in written["markdown"].read_text()
    assert written["plot"].read_bytes().startswith(b"\x89PNG")
    assert CliRunner().invoke(app, [str(file), "--scaling", "fixed=9"]).exit_code == 2
    assert "thousand-cells" in CliRunner().invoke(app, ["no-such-scenario"]).output
    arrivals = {"rate": 1.0, "seconds": 2.0}
    for changed, wrong in (
        ({"profile": "abacus"}, "unknown profile 'abacus'"),
        ({"system": "nobody"}, "unknown policy 'nobody'"),
        ({"arrivals": {**arrivals, "mix": {"poems": 1.0}}}, "no class ['poems']"),
        ({"arrivals": {**arrivals, "mix": {"code": 0.0}}}, "one is above 0"),
        ({"arrivals": {**arrivals, "ttft_ms": {"code": -1.0}}}, "arrivals.ttft_ms.code: must be greater"),
        ({"arrivals": {**arrivals, "rate": float("inf")}}, "arrivals.rate: must be a finite number"),
        ({"arrivals": {**arrivals, "trace": str(tmp_path / "no.csv")}}, "no.csv"),
    ):
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump(json.loads(SMALL.model_dump_json()) | changed))
        told = CliRunner().invoke(app, [str(other), "--processes", "1"])
        assert (told.exit_code, wrong in told.output) == (2, True), told.output
    for wrong, field in ((["--router", "nearest"], "router: "), (["--scaling", "fixed=many"], "initial: ")):
        told = CliRunner().invoke(app, [str(file), *wrong])
        assert (told.exit_code, field in told.output, "pydantic" in told.output) == (2, True, False)


def test_all_scenarios_can_be_read() -> None:
    assert {"thousand-cells", "eight-cells"} <= set(scenarios.names())
    for name in scenarios.names():
        assert scenarios.load(name).cells.max > 1


def test_a_file_of_any_name_may_hold_a_scenario(tmp_path: Path) -> None:
    """One called `small.txt` was told to be no scenario, with the advice to give a file."""
    file = tmp_path / "small"
    file.write_text(SMALL.model_dump_json())
    assert scenarios.load(str(file)) == SMALL
    for content, wrong in (
        (b"\xff\xfe", "it is not UTF-8"),
        (b"", "is no scenario"),
        (b"a: [", "is no scenario"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=wrong):
            scenarios.load(str(file))
    with pytest.raises(ValueError, match=r"cannot read the scenario .*: Is a directory"):
        scenarios.load(str(tmp_path))
    with pytest.raises(ValueError, match="there is no such file"):
        scenarios.load(str(tmp_path / "none.yaml"))


def test_a_cell_that_holds_calls_back_ticks_once_a_second() -> None:
    """Each of its wakes came again every second, for ever."""
    system = cell_system("flotilla", 8, 64)
    scheduler = system.config.scheduler.model_copy(update={"async_scheduling": True})
    system = replace(system, config=system.config.model_copy(update={"scheduler": scheduler}))
    cell = FleetCell(hardware.load("llama-8b-h200-eagle"), system, Options(), 0.0)
    for number in range(4):
        cell.submit(one_request(number, num_output=200))
    cell.advance(20.0)
    assert len(cell.receipts) == 4
    assert len(cell.clock) == 1
