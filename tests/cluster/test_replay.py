"""Decisions of real steps, made again from their record: the same by the same policy, whatever happened."""

from __future__ import annotations

import fcntl
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.decision_log import STALE_CALLS
from cluster.decisions import (
    DecisionsError,
    Entry,
    Header,
    StepRecord,
    decode_entry,
    encode_entry,
    read_entries,
)
from cluster.local import LocalEngine
from cluster.policies.registry import POLICIES
from cluster.recorded_core import RecordedCore, newest_decisions
from cluster.replay import Replay, ReplayedStep, Segment
from cluster.replay_report import Comparison, describe
from cluster.stream_messages import Objective, Submit
from cluster.succession import take_over
from engine.sampling_params import SamplingParams
from tests.cluster.recorded_world import live, record, recorded_world
from tests.cluster.simulated import submit
from tests.cluster.small_family import small_family
from tests.cluster.test_core import World
from tests.examples import examples

VARIANTS = [
    *({"name": name} for name in ("adaserve", "flotilla", "smartspec", "specserve")),
    {"name": "smartspec", "smartspec_acceptance": "request"},
    {"name": "smartspec", "smartspec_acceptance": "confidence"},
]
OTHERS = [{"name": name} for name in sorted(POLICIES.keys() - {one["name"] for one in VARIANTS})]
VARIANTS += [pytest.param(one, marks=pytest.mark.thorough) for one in OTHERS]


def label(policy: dict[str, str]) -> str:
    return "-".join(policy.values())


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(FlotillaConfig.model_validate(small_family()))


def serve(engine: LocalEngine, policy: dict[str, str], file: Path | None, size: int = 0) -> list[bytes]:
    """Serve requests with and without objectives; the lines of the record."""
    raw = engine.config.model_dump()
    raw["policy"] = policy
    raw["scheduler"] = {"prefill_chunk": 32}
    raw["debug"] = {"decisions": size, "decisions_file": file}
    engine.use_policy(FlotillaConfig.model_validate(raw))
    engine.generate(
        [
            Submit(
                request_id=f"r{number}",
                prompt=[(17 * number + 31 * i) % 4000 + 4 for i in range(5 + 9 * number)],
                sampling=SamplingParams(temperature=0.7 * (number % 2), max_tokens=12, seed=number),
                objective=Objective(tpot_ms=1.0 if number % 3 == 0 else None),
            )
            for number in range(5)
        ]
    )
    return [] if file is None else file.read_bytes().splitlines(keepends=True)


def replay(lines: list[bytes], policy: str | None = None) -> list[ReplayedStep]:
    return [one for one in Replay(policy).run(read_entries(lines)) if isinstance(one, ReplayedStep)]


def steps_of(lines: list[bytes]) -> list[StepRecord]:
    return [entry for entry in read_entries(lines) if isinstance(entry, StepRecord)]


def differences(steps: list[ReplayedStep]) -> list[str]:
    return [line for step in steps if not step.is_same for line in describe(step)]


# -- real models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", VARIANTS, ids=label)
def test_replaying_real_steps_decides_the_same(
    engine: LocalEngine, tmp_path: Path, policy: dict[str, str]
) -> None:
    lines = serve(engine, policy, tmp_path / "decisions.jsonl")
    steps = replay(lines)
    assert differences(steps) == []
    assert len(steps) == len(steps_of(lines)) > 5
    # Every token that was committed while decoding is accounted for; each request's first is of its prefill.
    committed = sum(one.committed or 0 for step in steps for one in step.record.requests)
    assert committed == engine.core.totals.committed_tokens - 5
    accepted = sum(len(one.accepted) for step in steps for one in step.record.requests)
    assert accepted == engine.core.totals.accepted_tokens
    verified = sum(one.verified or 0 for step in steps for one in step.record.requests)
    assert verified == engine.core.totals.verified_tokens
    for step in steps:
        assert step.record.verify is not None
        assert (step.record.verify.actual or 0.0) > 0.0
        assert step.record.whole is not None
        assert (step.record.whole.actual or 0.0) >= step.record.verify.actual


def test_adaserve_says_which_phase_chose_a_node_and_what_it_aimed_at(
    engine: LocalEngine, tmp_path: Path
) -> None:
    lines = serve(engine, {"name": "adaserve"}, tmp_path / "decisions.jsonl")
    selections = [step for step in steps_of(lines) if step.select is not None]
    phases = {name for step in selections for one in step.requests for name in one.chosen}
    assert phases == {"slo-customized", "throughput-optimized"}
    for step in selections:
        assert step.select is not None
        assert step.select.budget is not None
        num_tokens = sum(len(step.requests[place].nodes) for place in step.select.requests)
        assert num_tokens <= max(step.select.budget, len(step.select.requests))
        for one in step.requests:
            if "slo-customized" in one.chosen:
                assert one.request.tpot_s is not None
                assert one.required_capped is not None
                assert 1.0 < one.required_capped <= one.required
        for place in step.select.requests:
            one = step.requests[place]
            assert one.tree is not None
            assert one.acceptance is not None
            assert len(one.acceptance) == len(one.tree.token)
            one.tree.subset(msgspec.json.decode(msgspec.json.encode(one.nodes), type=list)).validate()


def test_equal_greedy_has_a_budget_and_one_phase(engine: LocalEngine, tmp_path: Path) -> None:
    lines = serve(engine, {"name": "equal-greedy"}, tmp_path / "decisions.jsonl")
    selections = [step for step in steps_of(lines) if step.select is not None]
    assert {name for step in selections for one in step.requests for name in one.chosen} == {"selected"}
    assert all(step.select is not None and step.select.budget is not None for step in selections)


def test_another_policy_can_be_asked_about_the_same_steps(engine: LocalEngine, tmp_path: Path) -> None:
    lines = serve(engine, {"name": "adaserve"}, tmp_path / "decisions.jsonl")
    comparison = Comparison()
    for step in replay(lines, "autoregressive"):
        comparison.add(step)
    table = {name: (recorded, replayed) for name, recorded, replayed in comparison.table()}
    assert comparison.num_different > 0
    assert table["requests drafted for"][1].startswith("0 of ")
    assert not table["requests drafted for"][0].startswith("0 of ")
    with pytest.raises(ValueError, match="unknown policy"):
        replay(lines, "luck")


def test_with_no_record_asked_for_the_core_is_the_plain_one(engine: LocalEngine) -> None:
    serve(engine, {"name": "adaserve"}, None)
    assert type(engine.core) is SchedulerCore
    assert newest_decisions(engine.core, 5) is None


def test_the_ring_is_bounded_and_what_it_holds_can_be_replayed(engine: LocalEngine) -> None:
    serve(engine, {"name": "adaserve"}, None, size=4)
    core = engine.core
    assert isinstance(core, RecordedCore)
    assert len(core.log) == 4
    assert not core.log.has_unwritten
    for limit in (1, 4, 100):
        dump = newest_decisions(core, limit)
        assert dump is not None
        lines = dump.splitlines(keepends=True)
        items = list(Replay().run(read_entries(lines)))
        assert isinstance(items[0], Segment)
        assert items[0].starts_midway
        assert len(items[1:]) == min(limit, 4)
        assert all(isinstance(item, ReplayedStep) and item.is_same for item in items[1:])


# -- a scheduler to which everything happens ---------------------------------------------------------


# The target is lost with cancelled requests' step; a first step is written late; one judged by is still open.
@example(seed=89538, policy="specserve", sizes=(1, 220, 120))
@example(seed=9536, policy="specserve", sizes=(1, 220, 120))
@example(seed=2280, policy="flotilla", sizes=(1, 220, 13))
@examples(40)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["adaserve", "flotilla", "specserve", "smartspec", "fixed", "equal-greedy"]),
    # Micro-batches, the target's slots, and events.
    sizes=st.tuples(st.integers(1, 4), st.sampled_from([220, 400]), st.integers(10, 120)),
)
def test_losses_cancellations_and_micro_batches_replay_the_same(
    tmp_path_factory: pytest.TempPathFactory, seed: int, policy: str, sizes: tuple[int, int, int]
) -> None:
    file = tmp_path_factory.mktemp("record") / "decisions.jsonl"
    world = recorded_world(seed, policy, file, *sizes[:2])
    live(world, sizes[2])
    assert isinstance(world.core, RecordedCore)
    if not file.exists():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    replayed = Replay()
    steps = [one for one in replayed.run(read_entries(lines)) if isinstance(one, ReplayedStep)]
    recorded = steps_of(lines)
    written = {order for step in recorded for order in step.orders}
    # Beyond a plan that is in no step of the file, who learns from its own plans cannot be followed.
    gap = next(order for order in range(len(written) + 1) if order not in written)
    known = [one for one in steps if policy != "flotilla" or max(one.record.orders, default=-1) < gap]
    assert differences(known) == []
    assert (len(steps), len(written)) == (len(recorded), sum(len(step.orders) for step in recorded))
    # Such plans belong to steps that are still open: never many.
    num_open = max(written, default=-1) + 1 - len(written)
    assert max(num_open, replayed.num_missing) <= 2 * STALE_CALLS


def test_cores_that_take_turns_on_one_file_keep_their_memory(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    world = recorded_world(1, "specserve", file)
    first = world.core
    for turn in range(3):
        if turn == 1:
            record(world, "fixed", file)
        elif turn == 2:
            take_over(first, world.core, world.now)
            world.core = first
        for number in range(10 * turn, 10 * turn + 10):
            world.send(submit(number, world.rng))
        while world.answer_one():
            world.core.reflect()
    lines = file.read_bytes().splitlines(keepends=True)
    items = list(Replay().run(read_entries(lines)))
    segments = [item for item in items if isinstance(item, Segment)]
    assert [segment.policy.name for segment in segments] == ["specserve", "fixed", "specserve"]
    assert segments[2].header.first_call > 0
    assert not any(segment.starts_midway for segment in segments)
    assert differences([item for item in items if isinstance(item, ReplayedStep)]) == []
    # Without the first turn, the third one starts with what nobody knows.
    begins = [index for index, entry in enumerate(read_entries(lines)) if isinstance(entry, Header)]
    third = list(Replay().run(read_entries(lines[begins[2] :])))
    assert isinstance(third[0], Segment)
    assert third[0].starts_midway


def test_a_file_moved_away_is_begun_anew_and_a_line_cut_off_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    file.write_bytes(b'{"record":"st')
    world = recorded_world(2, "adaserve", file)
    for moved in (False, True):
        if moved:
            file.rename(tmp_path / "old.jsonl")
        for number in range(10 * moved, 10 * moved + 10):
            world.send(submit(number, world.rng))
        while world.answer_one():
            world.core.reflect()
    with pytest.raises(DecisionsError, match="line 1 is no entry"):
        replay((tmp_path / "old.jsonl").read_bytes().splitlines(keepends=True))
    assert differences(replay((tmp_path / "old.jsonl").read_bytes().splitlines(keepends=True)[1:])) == []
    items = list(Replay().run(read_entries(file.read_bytes().splitlines(keepends=True))))
    assert isinstance(items[0], Segment)
    assert items[0].starts_midway
    assert len(items) > 5


def test_lines_wait_while_another_cell_writes(tmp_path: Path) -> None:
    """Who had looked at the file just before went on without a header behind what the other wrote."""
    file, other = tmp_path / "decisions.jsonl", tmp_path / "other.jsonl"
    worlds = [recorded_world(seed, "adaserve", path) for seed, path in ((1, file), (2, other))]

    def run(world: World) -> None:
        for number in range(len(world.submitted), len(world.submitted) + 5):
            world.send(submit(number, world.rng))
        while world.answer_one():
            world.core.reflect()

    run(worlds[0])
    run(worlds[1])
    before = file.read_bytes()
    with file.open("ab") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        run(worlds[0])
        assert file.read_bytes() == before
        writing.write(other.read_bytes())
    worlds[0].core.reflect()
    lines = file.read_bytes().splitlines(keepends=True)
    headers = [entry for entry in read_entries(lines) if isinstance(entry, Header)]
    first, second, third = (header.scheduler for header in headers)
    assert first == third != second
    assert differences(replay(lines)) == []


def test_a_disk_that_takes_nothing_stops_the_record_and_not_the_cell(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = recorded_world(3, "adaserve", tmp_path / "no such directory" / "decisions.jsonl")
    for number in range(10):
        world.send(submit(number, world.rng))
    while world.answer_one():
        world.core.reflect()
    world.check_ends()
    core = world.core
    assert isinstance(core, RecordedCore)
    assert not core.log.has_unwritten
    assert [entry.levelname for entry in caplog.records] == ["ERROR"]
    assert "no longer recorded" in caplog.text


# -- what is wrong shows -----------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    world = recorded_world(5, "adaserve", tmp_path / "decisions.jsonl")
    for number in range(12):
        world.send(submit(number, random.Random(number), objective=Objective(tpot_ms=5.0)))
    while world.answer_one():
        world.core.reflect()
    return (tmp_path / "decisions.jsonl").read_bytes().splitlines(keepends=True)


def changed(lines: list[bytes], change: Callable[[StepRecord], None]) -> Iterator[bytes]:
    for line in lines:
        entry: Entry = decode_entry(line)
        if isinstance(entry, StepRecord):
            change(entry)
        yield encode_entry(entry) + b"\n"


def test_decisions_that_do_not_follow_are_shown(lines: list[bytes]) -> None:
    def deeper(step: StepRecord) -> None:
        for one in step.requests:
            if one.plan is not None:
                one.plan = msgspec.structs.replace(one.plan, depth=one.plan.depth + 1)

    def fewer(step: StepRecord) -> None:
        for one in step.requests:
            one.chosen = {}

    assert differences(replay(list(changed(lines, lambda step: None)))) == []
    shown = "\n".join(differences(replay(list(changed(lines, deeper)))))
    assert "plan of r0" in shown
    assert "recorded: depth" in shown
    shown = "\n".join(differences(replay(list(changed(lines, fewer)))))
    assert "selection of r" in shown
    assert "recorded: no nodes" in shown


def test_a_record_that_contradicts_itself_is_refused(lines: list[bytes]) -> None:
    def nobody(step: StepRecord) -> None:
        step.plans = [msgspec.structs.replace(call, requests=[99]) for call in step.plans]

    def no_tree(step: StepRecord) -> None:
        for one in step.requests:
            one.tree = None

    def broken_tree(step: StepRecord) -> None:
        for one in step.requests:
            if one.tree is not None:
                one.tree = msgspec.structs.replace(one.tree, parent=one.tree.parent[:0])

    for change, message in (
        (nobody, "names requests that it does not hold"),
        (no_tree, "the candidate tree of request r.*missing"),
        (broken_tree, "the candidate tree of request r.*differ in length"),
    ):
        with pytest.raises(DecisionsError, match=message):
            replay(list(changed(lines, change)))
    header = decode_entry(lines[0])
    assert isinstance(header, Header)
    other = msgspec.structs.replace(header, policy={"name": "adaserve", "luck": 3})
    with pytest.raises(DecisionsError, match=r"does not suit this version: `luck`"):
        replay([encode_entry(other) + b"\n", *lines[1:]])


def test_lines_missing_in_between_are_counted(lines: list[bytes]) -> None:
    replayed = Replay()
    kept = [line for number, line in enumerate(lines) if number < 10 or b'"step"' not in line or number > 14]
    steps = [one for one in replayed.run(read_entries(kept)) if isinstance(one, ReplayedStep)]
    assert len(steps) == len(steps_of(kept)) < len(steps_of(lines))
    assert replayed.num_missing > 0
