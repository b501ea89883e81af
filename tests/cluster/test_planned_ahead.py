"""Steps with drafts are sent ahead: when, when not, and that both ends grow the same trees at all times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.decisions import StepRecord, decode_entry, read_entries
from cluster.events import DrafterDraining, VerifyDone
from cluster.invariants import check_at_rest
from cluster.policies.registry import make_policy
from cluster.recorded_core import RecordedCore, make_core
from cluster.replay import Replay, ReplayedStep
from cluster.stream_messages import Objective, Speculation, Submit
from engine.constraint import Constraint
from tests.cluster.ahead_world import LONG, ends, ids, interrupt, is_ahead
from tests.cluster.heads_world import CHEAP, OVERHEAD_S, HeadsWorld
from tests.cluster.proposing_target import LAYERS, ProposingTarget
from tests.cluster.proposing_world import ProposingWorld, is_planned
from tests.cluster.simulated import STOP, submit
from tests.examples import examples
from verifier.messages import VerifyCall, VerifyResult

GRAMMAR = msgspec.structs.replace(LONG, constraint=Constraint(kind="regex", text="[a-z]*"))
SMARTSPEC: dict[str, object] = {"name": "smartspec", "smartspec_ahead": True}
KINDS = pytest.mark.parametrize("kind", ["eagle", "heads"])


@KINDS
@pytest.mark.parametrize("policy", ["flotilla", "fixed", SMARTSPEC], ids=["flotilla", "fixed", "smartspec"])
def test_the_target_has_the_next_drafts_plan_while_it_works_on_one(
    policy: str | dict[str, object], kind: Literal["heads", "eagle"]
) -> None:
    world = ProposingWorld(1, policy, kind=kind, accuracy=1.0)
    world.begin("a", "b", sampling=ends(120))
    for _ in range(8):
        assert world.num_at_target == 2
        assert is_planned(world.calls[-1])
        assert is_ahead(world.calls[-1])
        assert world.answer_one()
    world.drain()
    world.check_ends()
    check_at_rest(world.core)
    assert world.compared > 20
    totals = world.core.totals
    # What was proposed was right, and all of it was verified.
    assert totals.accepted_tokens > 150
    if kind == "eagle":
        assert totals.accepted_tokens == totals.verified_tokens
    assert totals.drafted_tokens >= totals.verified_tokens
    assert len(world.calls) < 120 / 2
    ahead = [call for call in world.calls if is_ahead(call)]
    planned = sum(map(is_planned, ahead))
    assert totals.steps_ahead == {True: planned, False: len(ahead) - planned}
    assert planned > len(world.calls) / 2


def test_what_is_learnt_of_drafts_is_what_they_were() -> None:
    world = ProposingWorld(3, accuracy=0.7)
    world.begin("a", "b", "c", sampling=ends(150))
    while "a" in world.core.requests and world.core.requests["a"].num_remaining > 20:
        world.answer_one()
    assert world.compared > 50
    pool, planner = world.core.pool, world.core.planner
    assert pool.acceptance.rate("a", "good") == pytest.approx(0.7, abs=0.12)
    planner.calibrate()
    # Each first choice says 0.9, and is right seven times in ten.
    (chance,) = planner.calibration.of("good").apply(np.array([0.899]))
    assert chance == pytest.approx(0.7, abs=0.1)
    world.drain()
    world.check_ends()


def test_times_are_those_of_the_step_and_of_what_was_proposed() -> None:
    world = HeadsWorld("flotilla", CHEAP, 0.95, kind="eagle")
    for number in range(4):
        world.submit(number, 600)
    world.run(60)
    assert all(map(is_planned, world.calls[-40:]))
    assert world.plans == [], "a draft call was made"
    core = world.core
    assert core.cost.correction("heads") == pytest.approx(1.0, rel=0.05)
    # The step takes nothing beside its forward, its proposals, and what the target has to do itself.
    assert core.planner.overhead.drafted_s(4) == pytest.approx(OVERHEAD_S, rel=0.2)
    assert core.totals.step_draft_s == pytest.approx(world.evaluated_s, rel=0.1)
    grown = core.planned_ahead.take_grown()
    assert [(one.kind, one.num_requests) for one in grown] == [("heads", 4)]
    assert core.planned_ahead.take_grown() == []


@pytest.mark.parametrize(
    ("policy", "changes", "scheduler"),
    [
        ("flotilla", {}, {"async_scheduling": False}),
        ("flotilla", {}, {"micro_batches": 2}),
        ("smartspec", {}, {}),
        ("adaserve", {}, {}),
        ("flotilla", {"sampling": GRAMMAR}, {}),
    ],
    ids=["switched off", "of two micro-batches", "a policy that waits", "one that selects", "with a grammar"],
)
def test_drafts_are_planned_with_the_answer_where(
    policy: str, changes: dict[str, object], scheduler: dict[str, object]
) -> None:
    world = ProposingWorld(1, policy, **scheduler)
    for name in ("a", "b"):
        world.send(Submit(request_id=name, prompt=[3] * 10, **({"sampling": LONG} | changes)))
    world.drain()
    world.check_ends()
    assert world.core.totals.accepted_tokens > 0
    assert not any(map(is_planned, world.calls))


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("target", "tensor_parallel", 2),
        ("selector", "name", "lbss"),
        ("selector", "name", "epsilon-greedy"),
    ],
    ids=[
        "each of its ranks would grow trees for itself",
        "a bandit learns of a slot before the next",
        "so do all",
    ],
)
def test_a_target_is_asked_in_turn_where(part: str, name: str, value: object) -> None:
    world = ProposingWorld(1)
    raw = world.config.model_dump()
    raw[part][name] = value
    config = FlotillaConfig.model_validate(raw)
    world.core = SchedulerCore(config, make_policy(config.policy), CostModel(DEFAULT_PROFILE))
    world.start_target()
    world.start_drafter("good")
    world.begin("a", "b")
    world.drain()
    world.check_ends()
    assert world.core.totals.accepted_tokens > 0
    assert not any(map(is_planned, world.calls))


def test_one_that_another_drafter_serves_keeps_the_others_waiting() -> None:
    world = ProposingWorld(1, "flotilla")
    world.start_drafter("poor")
    own, other = Speculation(drafters=["good"]), Speculation(drafters=["poor"])
    world.send(Submit(request_id="a", prompt=[3] * 10, sampling=ends(150), speculation=own))
    world.send(Submit(request_id="b", prompt=[4] * 10, sampling=ends(30), speculation=other))
    world.drain()
    world.check_ends()
    beside = [call for call in world.calls if ids(call) == {"a", "b"}]
    assert beside
    assert not any(map(is_planned, beside))
    alone = [call for call in world.calls if ids(call) == {"a"}]
    assert sum(map(is_planned, alone)) > len(alone) / 2


def test_who_is_not_to_be_drafted_for_goes_on_beside_the_others() -> None:
    world = ProposingWorld(1)
    world.send(
        Submit(request_id="plain", prompt=[3] * 10, sampling=ends(30), speculation=Speculation(mode="off"))
    )
    world.begin("a", sampling=ends(150))
    world.drain()
    world.check_ends()
    both = [call for call in world.calls if ids(call) == {"a", "plain"}]
    assert sum(map(is_planned, both)) > len(both) / 2
    assert all(
        i.plan is None and not i.num_candidates for c in both for i in c.verify if i.request_id == "plain"
    )


def test_a_request_bounds_its_own_drafts() -> None:
    world = ProposingWorld(1, accuracy=1.0)
    world.begin("a", sampling=ends(90), speculation=Speculation(max_tokens=2))
    world.drain()
    world.check_ends()
    target = world.target
    assert isinstance(target, ProposingTarget)
    sizes = {len(tree) for grown in target.grown.values() for tree in grown.values()}
    assert max(sizes) == 3


def test_nobody_goes_on_beyond_the_models_window() -> None:
    world = ProposingWorld(1, accuracy=1.0)
    world.send(Submit(request_id="long", prompt=[3] * 120, sampling=ends(100)))
    world.drain()
    world.check_ends()
    assert len(world.output["long"]) == world.target.max_tokens - 120
    assert any(map(is_planned, world.calls))


def test_what_follows_a_stop_token_is_told_to_nobody() -> None:
    world = ProposingWorld(5, accuracy=1.0)
    for number in range(6):
        world.send(submit(number, world.rng, sampling=ends(60, stop_token_ids=(STOP,))))
    world.drain()
    world.check_ends()
    check_at_rest(world.core)
    assert set(world.reason.values()) == {"stop", "length"}
    assert any(map(is_planned, world.calls))


def test_a_newcomer_is_read_in_a_step_sent_ahead_and_drafted_for_in_the_next() -> None:
    world = ProposingWorld(1)
    world.begin("a", "b", sampling=ends(150))
    world.send(Submit(request_id="new", prompt=[9] * 10, sampling=LONG))
    world.answer_one()
    reading = world.calls[-1]
    assert [item.request_id for item in reading.prefill] == ["new"]
    assert is_planned(reading)
    assert reading.prefill[0].num_candidates, "of its first token's successors nothing would be proposed"
    world.answer_one()
    after = world.calls[-1]
    assert is_ahead(after)
    assert {item.request_id for item in after.verify if item.plan is not None} == {"a", "b", "new"}
    world.drain()
    world.check_ends()


def test_a_step_that_had_no_slots_for_somebody_is_made_up_for_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = ProposingWorld(1)
    world.begin("a", "b", sampling=ends(120))
    step = world.target.step

    def defers(call: VerifyCall) -> VerifyResult:
        served = [item for item in call.verify if item.request_id != "a"]
        return msgspec.structs.replace(step(msgspec.structs.replace(call, verify=served)), deferred=["a"])

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(world.target, "step", defers)
            world.answer_one()
        world.answer_one()
    world.drain()
    world.check_ends()
    assert world.compared > 20


def test_a_draining_drafter_is_left() -> None:
    world = ProposingWorld(1)
    world.begin("a", "b", sampling=ends(120))
    world.handle(DrafterDraining("good"))
    before = len(world.calls)
    world.drain()
    world.check_ends()
    assert not any(map(is_planned, world.calls[before + 1 :]))
    assert world.core.pool.drafters["good"].is_drained


@pytest.mark.parametrize("is_other_there", [False, True])
def test_drafts_are_credited_to_whom_they_were_planned_with_though_it_is_gone(is_other_there: bool) -> None:
    """The target grows their trees all the same."""
    world = ProposingWorld(1, "fixed", accuracy=1.0)
    world.begin("a", "b", sampling=ends(40))
    while not (world.num_at_target == 2 and is_planned(world.calls[-1])):
        assert world.answer_one()
    planned = world.calls[-1].call_id
    if is_other_there:
        world.start_drafter("poor")
    world.lose("good")
    before = dict(world.core.totals.accepted_by_drafter)
    while any(isinstance(one, VerifyDone) and one.result.call_id <= planned for one in world.answers):
        place = next(place for place, one in enumerate(world.answers) if isinstance(one, VerifyDone))
        world.handle(world.answers.pop(place))
    accepted = world.core.totals.accepted_by_drafter
    assert set(accepted) == {"good"}
    assert accepted["good"] > before["good"]
    assert "poor" not in world.core.planner.cost.corrections
    world.drain()
    world.check_ends()


def test_a_trace_shows_what_was_grown() -> None:
    world = ProposingWorld(1, accuracy=1.0)
    world.begin("a", sampling=ends(60), speculation=Speculation(trace=True))
    world.answer_one()
    world.answer_one()
    request = world.core.requests["a"]
    assert request.candidates is not None
    assert request.tree is request.candidates
    assert len(request.tree) == LAYERS + 1
    world.drain()
    world.check_ends()


def test_decisions_made_ahead_are_recorded_and_made_again() -> None:
    world = ProposingWorld(2, accuracy=0.8)
    raw = world.config.model_dump() | {"debug": {"decisions": 10_000}}
    world.core = make_core(FlotillaConfig.model_validate(raw), CostModel(DEFAULT_PROFILE))
    world.start_target()
    world.start_drafter("good")
    for number in range(5):
        world.send(
            Submit(
                request_id=f"r{number}",
                prompt=[3 + number] * 10,
                sampling=ends(60 + 9 * number),
                objective=Objective(tpot_ms=4.0 if number % 2 else None),
            )
        )
    world.drain()
    world.check_ends()
    core = world.core
    assert isinstance(core, RecordedCore)
    lines = core.log.dump(10_000)
    steps = [one for one in map(decode_entry, lines) if isinstance(one, StepRecord)]
    planned = [
        step for step in steps if step.plans and step.select is None and any(r.tree for r in step.requests)
    ]
    assert len(planned) > len(steps) / 2
    for step in planned:
        assert step.drafts
        assert step.verify is not None
        assert step.whole is not None
        for one in step.requests:
            if one.tree is not None and one.committed is not None:
                assert one.verified == len(one.tree) - 1 == len(one.nodes) - 1
                assert one.acceptance is not None
                assert len(one.acceptance) == len(one.tree)
    totals = core.totals
    assert sum(one.committed or 0 for step in steps for one in step.requests) == totals.committed_tokens - 5
    assert sum(len(one.accepted) for step in steps for one in step.requests) == totals.accepted_tokens
    assert sum(one.verified or 0 for step in steps for one in step.requests) == totals.verified_tokens
    again = [one for one in Replay().run(read_entries(lines)) if isinstance(one, ReplayedStep)]
    assert len(again) == len(steps)
    assert [step.differences for step in again if not step.is_same] == []


@examples(80)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_random_interruptions_change_no_text(seed: int, data: st.DataObject) -> None:
    policy, accuracy, kind = (
        data.draw(st.sampled_from(["flotilla", "fixed", SMARTSPEC])),
        data.draw(st.sampled_from([0.5, 0.9, 1.0])),
        data.draw(st.sampled_from(["eagle", "heads"])),
    )
    num_slots = data.draw(st.sampled_from([300, 4000]))
    world = ProposingWorld(seed, policy, kind=kind, accuracy=accuracy, num_slots=num_slots)
    others: dict[str, Callable[[], None]] = {}
    if data.draw(st.booleans()):
        world.start_drafter("poor")

        def lose_other() -> None:
            world.lose("poor")
            world.start_drafter("poor")

        others["drafter"] = lose_other
    interrupt(world, data, share_off=0.2, others=others)
