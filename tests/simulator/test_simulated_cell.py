"""Whole simulated runs: the same texts whatever the policy, deterministic, accounted for."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.batching.registry import BATCHING_RULES
from cluster.events import Emit
from cluster.policies.registry import POLICIES
from simulator import hardware, report, systems, workloads
from simulator.cli import app
from simulator.clock import EventClock
from simulator.machine import Machine
from simulator.run import VOCAB_SIZE, Cell, Options, simulate
from tests.simulator.sim_requests import one_request, small_profile, some_requests


def texts_of(
    name: str, max_tokens: int | None = None, bounds: systems.Bounds | None = None, **changes: object
) -> dict[str, list[int]]:
    """What every request got, token for token, in order."""
    cell = Cell(small_profile(**changes), systems.parse(name, bounds), Options())
    got: dict[str, list[int]] = {}
    handle = cell.core.handle

    def listen(event, now):  # type: ignore[no-untyped-def]
        actions = handle(event, now)
        for action in actions:
            for told in action.events if isinstance(action, Emit) else ():
                assert told.position == len(got.setdefault(told.request_id, []))
                got[told.request_id] += told.tokens
        return actions

    cell.core.handle = listen  # type: ignore[method-assign]
    for number in range(8):
        cell.submit(replace(one_request(number), max_tokens=max_tokens))
    cell.run()
    return got


@cache
def plain() -> dict[str, list[int]]:
    """Without drafts."""
    return texts_of("autoregressive/sarathi")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_returns_the_same_texts(policy: str) -> None:
    expected = plain()
    assert all(len(tokens) == 64 for tokens in expected.values())
    assert texts_of(f"{policy}/sarathi") == expected
    assert texts_of(f"{policy}/sarathi", bounds=systems.Bounds(async_scheduling=True)) == expected


@pytest.mark.parametrize("name", ["autoregressive", "fixed-4", "adaserve", "flotilla"])
def test_an_answer_ends_before_its_bound_where_it_would_have_ended(name: str) -> None:
    known = texts_of(name)
    for request_id, tokens in texts_of(name, max_tokens=200).items():
        assert tokens == [*known[request_id][:-1], VOCAB_SIZE]
    assert texts_of(name, max_tokens=64) == known


@pytest.mark.parametrize("rule", sorted(BATCHING_RULES))
def test_every_batching_rule_returns_the_same_texts(rule: str) -> None:
    assert texts_of(f"flotilla/{rule}") == plain()


def test_a_full_cache_preempts_and_changes_nothing() -> None:
    assert texts_of("flotilla", num_slots=500) == plain()


@pytest.mark.parametrize("name", ["flotilla", "adaserve", "vllm"])
def test_a_seed_fixes_the_run(name: str) -> None:
    requests = some_requests(count=16)
    runs = [simulate(small_profile(), systems.parse(name), requests) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].num_unfinished == 0
    assert runs[0].all.num_requests == len(requests)


def test_accepted_tokens_follow_the_drafters_probabilities() -> None:
    requests = some_requests(count=60)
    result = simulate(small_profile(), systems.parse("fixed-4"), requests)
    # Chains of four at a rate near 0.75 commit between two and four tokens.
    assert 2.0 < result.all.accepted_per_step < 4.2
    assert result.steps.draft_ms > 0.0
    assert result.steps.step_ms == pytest.approx(
        result.steps.draft_ms + result.steps.verify_ms + result.steps.other_ms
    )


def test_time_is_what_the_profile_says() -> None:
    profile = small_profile(drafters={})
    result = simulate(profile, systems.parse("vllm"), [one_request(0, 65)], Options(jitter=0.0))
    per_token = result.all.tpot_ms.mean
    assert per_token is not None
    expected = 1e3 * np.mean([profile.cost.seconds(1, 1, 31 + done) for done in range(64)])
    assert per_token == pytest.approx(expected + 1e3 * profile.overhead_s / 2, rel=0.01)


def test_steps_that_are_sent_ahead_take_their_forwards_alone() -> None:
    profile, requests = small_profile(drafters={}), [one_request(number, 65) for number in range(3)]
    found = []
    for is_ahead in (False, True):
        system = systems.parse("vllm", systems.Bounds(async_scheduling=is_ahead))
        found.append(simulate(profile, system, requests, Options(jitter=0.0)))
    waiting, ahead = found
    # The first step goes on without the two that come while the first prompt is read.
    assert ahead.steps.num_iterations == waiting.steps.num_iterations + 1
    assert ahead.num_unfinished == 0
    assert waiting.steps.step_ms - waiting.steps.verify_ms == pytest.approx(
        1e3 * profile.overhead_s / 2, rel=0.05
    )
    assert ahead.steps.step_ms == pytest.approx(ahead.steps.verify_ms, rel=0.01)


@pytest.mark.parametrize("rule", ["sarathi", "fcfs"])
def test_goodput_of_plain_steps_is_a_token_per_step_and_request(rule: str) -> None:
    """First tokens come from prompts, whose time is not in the steps: of 4 tokens they would be a third."""
    requests = [one_request(number, 4) for number in range(6)]
    requests = [replace(request, arrival_s=10.0 * number) for number, request in enumerate(requests)]
    result = simulate(small_profile(drafters={}), systems.parse(f"autoregressive/{rule}"), requests)
    assert result.steps.num_iterations == 18
    assert result.steps.goodput_tokens_s == pytest.approx(1e3 / result.steps.step_ms)


def test_a_collocated_drafter_and_a_forward_share_the_accelerator() -> None:
    machine = Machine(collocated=True)
    assert machine.verify(1, 0.0, 10.0) == 10.0
    assert machine.draft("d", 2.0, 1.0) == 4.0
    assert machine.due(1) == 11.0
    assert machine.verified(1) == 11.0
    apart = Machine(collocated=False)
    apart.verify(1, 0.0, 10.0)
    assert apart.draft("d", 2.0, 1.0) == 3.0
    assert apart.due(1) == 10.0


@pytest.mark.parametrize(("ready", "seconds"), [(12.0, 20.0), (12.0, 8.0), (7.0, 5.0)])
def test_a_shared_accelerator_does_no_more_than_it_can(ready: float, seconds: float) -> None:
    """A draft as long as the forward beside it, or longer, delays it by what it gets done meanwhile."""
    machine = Machine(collocated=True)
    machine.verify(1, 10.0, 10.0)
    ended = machine.draft("d", ready, seconds)
    beside = min(seconds - max(0.0, 10.0 - ready), 20.0 - max(ready, 10.0))
    assert machine.due(1) == 20.0 + beside
    assert ended == ready + seconds + beside
    # Both together take as long as one after the other.
    assert max(ended, machine.due(1)) == min(ready, 10.0) + 10.0 + seconds


def test_clock_keeps_order_and_refuses_the_past() -> None:
    clock: EventClock[str] = EventClock()
    clock.at(2.0, "b")
    clock.at(1.0, "a")
    clock.at(2.0, "c")
    assert [clock.take(), clock.take(), clock.take()] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="any more"):
        clock.at(1.0, "late")


def test_profiles_can_be_read_and_say_where_they_come_from() -> None:
    for name in hardware.names():
        profile = hardware.load(name)
        assert profile.name == name
        assert profile.source.split()[0] in ("fitted", "roofline", "measured")
        assert 0.003 < profile.baseline_s() < 0.1
        assert profile.num_slots > profile.max_tokens
    with pytest.raises(ValueError, match="llama-70b-a100"):
        hardware.load("llama-70b-abacus")


def test_a_file_of_any_name_may_hold_a_profile(tmp_path: Path) -> None:
    """One called `machine.txt` was told to be no known profile, as if there were no such file."""
    file = tmp_path / "machine"
    file.write_bytes((hardware.PROFILES / "llama-8b-h200.json").read_bytes())
    assert hardware.load(str(file)) == hardware.load("llama-8b-h200")
    with pytest.raises(ValueError, match=r"cannot read the profile .*: Is a directory"):
        hardware.load(str(tmp_path))
    with pytest.raises(ValueError, match="there is no such file"):
        hardware.load(str(tmp_path / "none.json"))


def test_the_baseline_of_a_measured_machine_is_what_one_request_takes_alone() -> None:
    profile = hardware.load("demo-2-cores")
    # Some request or other meets the machine in a slow phase: on average none does.
    shapes = [workloads.Shape("code", 500, 40, arrival_s=5.0 * number) for number in range(50)]
    requests = workloads.arrive(shapes, profile.baseline_s(), own_times=True)
    alone = simulate(profile, systems.parse("autoregressive"), requests).all
    assert alone.tpot_ms.mean == pytest.approx(1e3 * profile.baseline_s(), rel=0.05)


@pytest.mark.parametrize("text", ["nobody", "fixed-99", "flotilla/nothing"])
def test_unknown_systems_are_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"unknown|less than|equal"):
        systems.parse(text)


def test_the_command_serves_a_full_loop_beside_the_oracle() -> None:
    arguments = ["--profile", "llama-8b-a100", "--policy", "autoregressive/flotilla,flotilla,oracle/flotilla"]
    loop = ["--at-once", "4", "--lengths", "code=110:55,summary=230:18", "--seconds", "6", "--json"]
    ran = CliRunner().invoke(app, arguments + loop)
    assert ran.exit_code == 0, ran.output
    plain, flotilla, oracle = (run["simulated_s"] for run in json.loads(ran.stdout)["runs"])
    assert oracle < plain
    assert flotilla < plain
    for wrong in ("code=110", "code=0:5", "code"):
        ran = CliRunner().invoke(app, ["--lengths", wrong])
        assert ran.exit_code == 2
        assert "CLASS=PROMPT:ANSWER" in ran.output
    assert CliRunner().invoke(app, ["--lengths", "code=1:1", "--mix", "code=1"]).exit_code == 2


def test_the_command_compares_systems_and_prints_json() -> None:
    arguments = [
        "--profile",
        "llama-8b-a100",
        "--policy",
        "vllm,flotilla",
        "--seconds",
        "2",
        "--rate",
        "5",
        "--json",
    ]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    body = json.loads(ran.stdout)
    assert [run["system"] for run in body["runs"]] == ["vllm", "flotilla"]
    assert body["runs"][0]["classes"]["all"]["num_requests"] == 10
    wrong = CliRunner().invoke(app, ["--policy", "nobody"])
    assert wrong.exit_code == 2
    assert "unknown policy" in wrong.output


def test_seconds_of_a_workload_are_those_of_the_run_however_its_arrivals_are_stretched(
    tmp_path: Path,
) -> None:
    """A request a second for 100 s, at two a second: 10 s are the first 21 of them, to 20 s of the file."""
    path = tmp_path / "w.json"
    row = {"input_length": 4, "output_length": 2, "slo_ratio": -50}
    path.write_text(json.dumps([{**row, "emission_time_ms": 1000.0 * second} for second in range(101)]))
    arguments = ["--workload", str(path), "--policy", "vllm", "--json", "--seconds", "10.1"]
    for rate, count in (([], 11), (["--rate", "2"], 21)):
        ran = CliRunner().invoke(app, [*arguments, *rate])
        assert json.loads(ran.stdout)["num_requests"] == count
    # Slow at first: at the file's own mean rate, which is named, as without it, and not in half the time.
    uneven = [*range(100), *(100 + second / 10 for second in range(100))]
    path.write_text(json.dumps([{**row, "emission_time_ms": 1000.0 * second} for second in uneven]))
    for rate in ([], ["--rate", str(199 / uneven[-1])]):
        ran = CliRunner().invoke(app, [*arguments, *rate])
        assert json.loads(ran.stdout)["runs"][0]["simulated_s"] == pytest.approx(10.1, abs=0.2)
    told = CliRunner().invoke(app, [*arguments, "--burstiness", "0.5"])
    assert (told.exit_code, "--burstiness is of arrivals that are drawn" in told.output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--policy", ","], "--policy names no system"),
        (["--at-once", "4", "--peaks"], "have no peaks"),
        (["--lengths", "all=10:10,code=10:9"], "give that class another name"),
        (["--lengths", "background=10:10", "--background", "4"], "give that class another name"),
        (["--selector", "nobody"], "unknown selector `nobody`"),
        (["--slo", "code:ttft=2x"], "and there is none of ttft here"),
        (["--seed", "-1"], "--seed"),
        (["--profile", "demo-2-cores", "--lengths", "verse=10:10"], "no acceptance rate for class 'verse'"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_simulated_is_said(arguments: list[str], wrong: str) -> None:
    ran = CliRunner().invoke(app, ["--seconds", "2", *arguments])
    assert (ran.exit_code, wrong in ran.output) == (2, True), ran.output


def test_the_tables_say_who_was_refused() -> None:
    """A prompt too long for the cell counts as missed; nothing said why."""
    requests = [one_request(0), replace(one_request(1), num_prompt=1 << 16)]
    done = simulate(small_profile(), systems.parse("vllm"), requests)
    assert (done.num_rejected, done.num_unfinished, done.all.attainment) == (1, 0, 0.5)
    columns = {str(column.header): list(column.cells) for column in report.of_steps([done]).columns}
    assert (columns["refused"], columns["unfinished"]) == (["1"], ["0"])


def test_answers_that_do_not_fit_into_the_context_are_counted() -> None:
    """They had fewer tokens than the others of a comparison, and nothing told."""
    long = replace(one_request(1), num_prompt=240)
    ending = replace(one_request(2), max_tokens=128)
    done = simulate(small_profile(max_tokens=256), systems.parse("vllm"), [one_request(0), long, ending])
    assert (done.num_cut, done.num_rejected, done.num_unfinished, done.all.attainment) == (1, 0, 0, 1.0)
    columns = {str(column.header): list(column.cells) for column in report.of_steps([done]).columns}
    assert columns["cut off"] == ["1"]


def test_a_selector_says_which_drafter_serves_whom() -> None:
    """The command could compare policies, but not selectors."""
    held = hardware.load("demo-2-cores")
    found = {
        name: simulate(
            held, systems.parse("fixed-4", systems.Bounds(selector=name)), [one_request(n) for n in range(8)]
        )
        for name in ("greedy-length", "epsilon-greedy", "flotilla")
    }
    assert len({run.steps.step_ms for run in found.values()}) == len(found)


@pytest.mark.parametrize("name", sorted({*hardware.names()} - {"demo-2-cores"}))
def test_a_request_by_itself_is_as_quick_as_the_page_says_of_baselines(name: str) -> None:
    profile, context = hardware.load(name), 512
    alone = replace(one_request(0, num_output=201), num_prompt=context - 100)
    done = simulate(profile, systems.parse("autoregressive"), [alone], Options(jitter=0.0))
    counted_s = 0.0 if profile.trips else profile.overhead_s / 2
    assert done.all.tpot_ms.mean == pytest.approx(1e3 * (profile.baseline_s(context) - counted_s), rel=1e-3)
