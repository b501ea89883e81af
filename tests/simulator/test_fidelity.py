"""Where the "running system" is itself simulated, on a machine that is known: the comparison must find it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.acceptance_table import AcceptanceTable
from benchmarks.fidelity_record import (
    CALIBRATION,
    TEST,
    DraftSample,
    FidelityRecord,
    ServedRun,
)
from benchmarks.fidelity_steps import newest_step, read_steps
from cluster.config import DebugConfig
from cluster.recorded_core import newest_decisions
from cluster.stream_messages import Objective
from simulator.fidelity import compare, written_profile
from simulator.fidelity_fit import BEND, draft_seconds, fit_profile
from simulator.run import Cell, Options
from simulator.systems import parse
from simulator.workloads import SimRequest
from tests.simulator.known_machine import (
    AFTER_DRAFTING,
    CALL_S,
    DRAFTER_FACTOR,
    FACTOR,
    QUALITY,
    SATURATION,
    STEP,
    TOLD,
    TRIPS,
    calibrated_on,
    log,
    machine,
    record_of,
    served,
)

POLICIES = ("autoregressive", "fixed")
FEW = 12


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> FidelityRecord:
    """Without tests: of each policy two runs."""
    path: Path = tmp_path_factory.mktemp("fidelity") / "log.npz"
    table = log()
    table.save(path)
    runs = [
        served(machine(), table, policy, CALIBRATION, load, seed)
        for policy in POLICIES
        for load, seed in ((0.3, 1), (0.8, 2))
    ]
    return record_of(runs, acceptance_file=str(path))


@pytest.fixture(scope="module")
def record(calibration: FidelityRecord) -> FidelityRecord:
    """With a test of each policy after its calibration."""
    table, runs = AcceptanceTable.load(Path(calibration.acceptance_file)), []
    for policy in POLICIES:
        runs += [run for run in calibration.runs if run.policy == policy]
        runs.append(served(machine(), table, policy, TEST, 0.5, 3))
    return msgspec.structs.replace(calibration, runs=runs)


def briefly(run: ServedRun) -> ServedRun:
    """With few requests to simulate; what is fitted to it are its steps, and those stay."""
    return msgspec.structs.replace(run, requests=run.requests[:FEW])


def begun(record: FidelityRecord) -> FidelityRecord:
    """What is served before the tests is no more than begun."""
    runs = [briefly(run) if run.phase == CALIBRATION else run for run in record.runs]
    return msgspec.structs.replace(record, runs=runs)


def test_the_fit_finds_what_forwards_took_and_what_came_beside_them(calibration: FidelityRecord) -> None:
    fitted = fit_profile(calibration)
    assert fitted.factors["target"] == pytest.approx(FACTOR, rel=0.02)
    assert fitted.factors["target after drafting"] == pytest.approx(FACTOR * AFTER_DRAFTING, rel=0.02)
    assert fitted.factors["small"] == pytest.approx(DRAFTER_FACTOR, rel=0.05)
    assert fitted.profile.drafters["small"].call_s == pytest.approx(CALL_S, rel=0.1)
    assert sum(phase.std**2 for phase in fitted.profile.pace) < 0.1 * 0.05**2
    assert fitted.jitter == pytest.approx(0.05, rel=0.15)
    trips = fitted.profile.trips
    assert trips is not None
    # With the requests that there were, 1 to 4 at once, what counts is the sum.
    for requests in (1, 3):
        plain = TRIPS.verify_s + requests * TRIPS.verify_request_s
        assert trips.verify_s + requests * trips.verify_request_s == pytest.approx(plain, rel=0.1)
        both = plain + TRIPS.draft_s + requests * TRIPS.draft_request_s
        found = trips.verify_s + trips.draft_s + requests * (trips.verify_request_s + trips.draft_request_s)
        assert found == pytest.approx(both, rel=0.1)
    assert abs(fitted.error) < 0.02


def test_a_run_is_told_from_those_before_it_by_the_numbers_of_its_steps() -> None:
    system = parse("flotilla")
    system = replace(system, config=system.config.model_copy(update={"debug": DebugConfig(decisions=10_000)}))
    cell = Cell(machine(), system, Options())
    assert newest_step(newest_decisions(cell.core, 1) or b"") == -1
    request = SimRequest("first", "chat", 0.0, 20, 30, Objective(), seed=1)
    cell.submit(request)
    cell.run()
    first = newest_decisions(cell.core, 10_000) or b""
    newest = newest_step(newest_decisions(cell.core, 1) or b"")
    cell.submit(replace(request, request_id="second", arrival_s=cell.clock.now + 1.0, num_output=12))
    cell.run()
    both = newest_decisions(cell.core, 10_000) or b""
    assert newest_step(first) == newest < newest_step(both)
    later = read_steps(both, after=newest)
    assert later
    assert [*read_steps(first), *later] == read_steps(both)


def test_the_machine_is_written_for_others_to_simulate(calibration: FidelityRecord) -> None:
    with pytest.raises(ValueError, match="how good small drafts is not known, only general"):
        written_profile(calibration, "mine")
    machine = msgspec.structs.replace(calibration, environment={"cpus": 2, "processor": "this one"})
    machine = msgspec.structs.replace(machine, num_parameters={"small": 12_000})
    profile = written_profile(machine, "mine", {"small": QUALITY})
    assert profile.drafters["small"].num_parameters == 12_000
    assert (profile.name, profile.hardware, profile.acceptance) == ("mine", "2 cores, this one", "demo")
    assert profile.drafters["small"].quality == QUALITY
    assert profile.cost.delta == pytest.approx(FACTOR * calibration.profile.target.delta, rel=0.02)


@pytest.mark.thorough
def test_simulating_a_known_machine_gives_what_it_served(record: FidelityRecord) -> None:
    for point in compare(begun(record))["points"]:
        figures = point["figures"]
        for name in ("latency_ms", "tpot_ms", "step_ms", "goodput_tokens_s"):
            assert abs(figures[name]["error"]) < 0.1, (point["policy"], name, figures[name])
            assert abs(figures[name]["error with own costs"]) < 0.1, (point["policy"], name, figures[name])
        assert figures["attainment"]["simulated"] == pytest.approx(figures["attainment"]["served"], abs=0.1)


@pytest.mark.thorough
def test_several_simulations_are_averaged_whichever_process_they_ran_in(record: FidelityRecord) -> None:
    plain = [briefly(run) for run in record.runs if run.policy == "autoregressive" and run.load != 0.8]
    record = msgspec.structs.replace(record, runs=plain)
    once, twice = compare(record), compare(record, simulations=2)
    assert twice == compare(record, simulations=2, processes=2)
    (first,), (both,) = once["runs"], twice["runs"]
    assert first["served"] == both["served"]
    assert first["simulated"]["latency_ms"] != both["simulated"]["latency_ms"]
    assert first["simulated"]["latency_ms"] == pytest.approx(both["simulated"]["latency_ms"], rel=0.1)


@pytest.mark.thorough
def test_a_run_whose_first_requests_failed_is_as_long_as_it_was(record: FidelityRecord) -> None:
    """It was taken to begin with the first that was answered, and where none was that was an IndexError."""
    run, before = record.runs[2], record.runs[:2]
    failed = [msgspec.structs.replace(one, receipt=None) for one in run.requests[:FEW]]
    for requests in ([*failed, *run.requests[FEW : 2 * FEW]], failed):
        ends = [one.arrival_s + one.receipt.e2e_ms / 1e3 for one in requests if one.receipt is not None]
        test = msgspec.structs.replace(run, requests=requests, duration_s=max(ends, default=1.0))
        compared = compare(msgspec.structs.replace(record, runs=[*before, test]))
        goodput = compared["points"][0]["figures"]["goodput_tokens_s"]
        assert goodput["own costs"] == pytest.approx(goodput["served"], rel=0.25)
        assert bool(goodput["served"]) == bool(ends)


def test_a_wrong_machine_is_told_from_the_right_one(calibration: FidelityRecord) -> None:
    slow = [
        served(
            machine(target=1.5 * FACTOR),
            AcceptanceTable.load(Path(calibration.acceptance_file)),
            "autoregressive",
            TEST,
            0.5,
            3,
        )
    ]
    changed = FidelityRecord(
        environment={},
        profile=TOLD,
        num_slots=20_000,
        max_tokens=512,
        saturation=SATURATION,
        acceptance_file=calibration.acceptance_file,
        runs=[run for run in calibration.runs if run.policy == "autoregressive"] + slow,
    )
    (point,) = compare(begun(changed))["points"]
    assert point["figures"]["step_ms"]["error"] < -0.2
    # The costs of the test itself tell that it is the machine, and not the simulation.
    assert abs(point["figures"]["step_ms"]["error with own costs"]) < 0.1


def test_a_drafter_that_was_hardly_asked_is_as_slow_as_the_others() -> None:
    large = TOLD.drafters["small"].scaled(3.0)
    told = msgspec.structs.replace(TOLD, drafters={"large": large, "small": TOLD.drafters["small"]})
    small = DraftSample(drafter="small", num_requests=1, rows=[1, 1], num_context=50, seconds=0.0)
    took_s = 1.6 * draft_seconds(told.drafters["small"], small)
    often = msgspec.structs.replace(small, seconds=took_s)
    once = msgspec.structs.replace(small, drafter="large", seconds=5 * took_s)
    step = msgspec.structs.replace(STEP, profile_s=0.004, forward_s=0.004, whole_s=0.01)
    steps = [msgspec.structs.replace(step, drafts=[one]) for one in [often] * 200 + [once]]
    factors = fit_profile(calibrated_on(steps, told)).factors
    assert factors["small"] == pytest.approx(1.6, rel=1e-3)
    assert factors["large"] == pytest.approx(1.6, rel=0.02)


def test_forwards_of_prompts_alone_are_told_by_the_step_after_them(calibration: FidelityRecord) -> None:
    steps = [step for run in calibration.runs for step in run.steps]
    pairs = [pair for step in steps for pair in step.prompts]
    assert len(pairs) >= 0.2 * sum(len(run.requests) for run in calibration.runs)
    told, took = np.array(pairs).T
    assert float(np.median(took / told)) == pytest.approx(FACTOR, rel=0.03)


def test_large_forwards_that_are_slowed_less_bend_the_line() -> None:
    told = msgspec.structs.replace(TOLD, target=msgspec.structs.replace(TOLD.target, gamma_knee=0.0))
    bend_s = BEND * told.target.seconds(1, 1, 0)
    said = [bend_s * share for share in (0.25, 0.3, 0.5, 0.9, 1.5, 2.0, 4.0)] * 50
    pairs = [(s, 1.4 * min(s, bend_s) + 1.0 * max(0.0, s - bend_s)) for s in said]
    steps = [msgspec.structs.replace(STEP, profile_s=s, forward_s=w, whole_s=w) for s, w in pairs]
    fitted = fit_profile(calibrated_on(steps, told))
    assert fitted.factors["target"] == pytest.approx(1.4, rel=0.03)
    assert fitted.bend == pytest.approx(1.0 / 1.4, rel=0.03)
    for rows in (1, 8, 40, 150):
        profile_s = told.target.seconds(1, rows, 0)
        took_s = 1.4 * min(profile_s, bend_s) + max(0.0, profile_s - bend_s)
        assert fitted.profile.cost.seconds(1, rows, 0) == pytest.approx(took_s, rel=0.03)


@pytest.mark.parametrize(("few", "share"), [([0.003], 0.6), ([0.003, 0.003, 0.009], 1.0), ([], 0.75)])
def test_plain_steps_that_are_rare_take_their_share_of_what_drafted_ones_take(
    few: list[float], share: float
) -> None:
    drafts = [DraftSample(drafter="small", num_requests=1, rows=[1], num_context=50, seconds=1e-3)]
    plain = msgspec.structs.replace(STEP, profile_s=0.004, forward_s=0.004)
    drafted = msgspec.structs.replace(plain, whole_s=0.004 + 1e-3 + 0.005, drafts=drafts)
    rare = [msgspec.structs.replace(plain, whole_s=0.004 + rest_s) for rest_s in few]
    trips = fit_profile(calibrated_on([drafted] * 100 + rare)).profile.trips
    assert trips is not None
    assert trips.verify_s + trips.verify_request_s == pytest.approx(share * 0.005, rel=1e-3)
    both_s = trips.verify_s + trips.verify_request_s + trips.draft_s + trips.draft_request_s
    assert both_s == pytest.approx(0.005, rel=1e-3)


@pytest.mark.parametrize("told", [True, False])
def test_drafts_slow_what_decodes_and_not_the_prompts_beside_it(told: bool) -> None:
    # A third of the drafted steps reads a prompt that makes its forward five times as long.
    plain = [msgspec.structs.replace(STEP, profile_s=0.004, forward_s=0.004, whole_s=0.01)] * 100
    plain[0] = msgspec.structs.replace(plain[0], prompts=[(0.02, 0.02), (0.05, 0.05)] * 50)
    drafts = [DraftSample(drafter="small", num_requests=1, rows=[1], num_context=50, seconds=1e-3)]
    drafted = [
        msgspec.structs.replace(
            STEP,
            profile_s=0.004 + prompts_s,
            decoding_s=0.004 if told else None,
            forward_s=1.5 * 0.004 + prompts_s,
            whole_s=0.05,
            drafts=drafts,
        )
        for prompts_s in [0.0, 0.0, 0.02] * 40
    ]
    found = fit_profile(calibrated_on(plain + drafted)).profile.after_drafting
    # Records that do not tell them apart have the mean slowing of whole forwards.
    assert found == pytest.approx(1.5 if told else 1.0 + 3 * 0.002 / (3 * 0.004 + 0.02), rel=1e-3)


@pytest.mark.parametrize("as_prompts", [False, True])
@pytest.mark.parametrize(("fixed_s", "factor"), [(0.002, 1.2), (0.0, 1.7)])
def test_what_forwards_take_on_top_is_told_from_a_factor(
    fixed_s: float, factor: float, as_prompts: bool
) -> None:
    rng = np.random.default_rng(5)
    said = np.concatenate([np.full(900, 0.004), np.full(100, 0.03)])
    was = (fixed_s + factor * said) * np.exp(rng.normal(0.0, 0.1, len(said)))
    pairs = [(float(s), float(w)) for s, w in zip(said, was, strict=True)]
    num_steps = 900 if as_prompts else len(pairs)
    steps = [msgspec.structs.replace(STEP, profile_s=s, forward_s=w, whole_s=w) for s, w in pairs[:num_steps]]
    steps[0] = msgspec.structs.replace(steps[0], prompts=pairs[num_steps:])
    fitted = fit_profile(calibrated_on(steps))
    assert fitted.fixed_s == pytest.approx(fixed_s, abs=0.0003)
    assert fitted.factors["target"] == pytest.approx(factor, rel=0.06)
