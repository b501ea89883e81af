"""Plain steps are sent ahead: when, when not, and that whatever comes in between changes no text."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.events import Cancelled
from cluster.invariants import check_at_rest
from cluster.requests import State
from cluster.stream_messages import Speculation, Submit
from engine.constraint import Constraint
from tests.cluster.ahead_world import LONG, AheadWorld, ends, ids, interrupt, is_ahead
from tests.cluster.simulated import STOP, expected_output, submit
from tests.examples import examples
from verifier.messages import VerifyCall, VerifyResult

GRAMMAR = msgspec.structs.replace(LONG, constraint=Constraint(kind="regex", text="[a-z]*"))
OFF = Speculation(mode="off")


def test_the_target_has_the_next_step_while_it_works_on_one() -> None:
    world = AheadWorld(1)
    world.begin("a", "b")
    for _ in range(20):
        assert world.num_at_target == 2
        assert world.answer_one()
    world.drain()
    world.check_ends()
    check_at_rest(world.core)
    decoding = [call for call in world.calls if call.verify]
    assert sum(map(is_ahead, decoding)) >= len(decoding) - 2
    # A step each, and no more of them than without.
    assert len(world.calls) <= LONG.max_tokens + 2


@pytest.mark.parametrize(
    ("policy", "changes", "scheduler"),
    [
        ("autoregressive", {}, {"async_scheduling": False}),
        ("autoregressive", {}, {"micro_batches": 2}),
        ("fixed", {}, {}),
        ("autoregressive", {"sampling": GRAMMAR}, {}),
        ("autoregressive", {"sampling": GRAMMAR, "speculation": OFF}, {}),
    ],
    ids=["switched off", "of two micro-batches", "drafted for", "with a grammar", "with it alone"],
)
def test_the_next_step_waits_where(
    policy: str, changes: dict[str, object], scheduler: dict[str, object]
) -> None:
    world = AheadWorld(1, policy, **scheduler)
    for name in ("a", "b"):
        world.send(Submit(request_id=name, prompt=[3] * 10, **({"sampling": LONG} | changes)))
    world.drain()
    world.check_ends()
    assert not any(map(is_ahead, world.calls))


@pytest.mark.parametrize("policy", ["autoregressive", "fixed", "adaserve", "flotilla"])
def test_who_must_not_be_drafted_for_goes_on_with_any_policy(policy: str) -> None:
    world = AheadWorld(1, policy)
    world.begin("a", "b", speculation=OFF)
    world.drain()
    world.check_ends()
    assert sum(map(is_ahead, world.calls)) > 30


def test_one_that_is_drafted_for_keeps_the_others_from_going_on() -> None:
    world = AheadWorld(1, "fixed")
    world.send(Submit(request_id="plain", prompt=[3] * 10, sampling=ends(20), speculation=OFF))
    world.send(Submit(request_id="drafted", prompt=[4] * 10, sampling=LONG))
    world.drain()
    world.check_ends()
    # Until its prompt is read there is nothing to draft.
    read = next(
        i for i, call in enumerate(world.calls) if any(c.request_id == "drafted" for c in call.prefill)
    )
    assert "plain" in ids(world.calls[read + 4])
    assert not any(map(is_ahead, world.calls[read + 1 :]))


def test_without_drafters_nobody_is_drafted_for() -> None:
    world = AheadWorld(1, "fixed")
    for name in ("good", "poor"):
        world.lose(name)
    world.begin("a")
    world.drain()
    world.check_ends()
    assert sum(map(is_ahead, world.calls)) > 30


def test_a_newcomer_is_prefilled_after_what_was_sent() -> None:
    world = AheadWorld(1)
    world.begin("a", "b")
    assert world.num_at_target == 2
    world.send(Submit(request_id="new", prompt=[9] * 10, sampling=LONG))
    world.answer_one()
    assert [item.request_id for item in world.calls[-1].prefill] == ["new"]
    assert ids(world.calls[-1]) == {"a", "b"}
    assert is_ahead(world.calls[-1])
    world.answer_one()
    assert ids(world.calls[-1]) == {"a", "b", "new"}, "its first token is decided by the call before"
    assert is_ahead(world.calls[-1])
    assert world.num_at_target == 2
    world.drain()
    world.check_ends()
    assert len(world.calls) <= LONG.max_tokens + 4


def test_a_prompt_in_parts_is_read_in_steps_that_are_sent_ahead() -> None:
    world = AheadWorld(1, prefill_chunk=32)
    world.begin("a", "b")
    world.send(Submit(request_id="new", prompt=[9] * 80, sampling=LONG))
    before = len(world.calls)
    world.drain()
    world.check_ends()
    *reading, after = world.calls[before : before + 4]
    assert [call.prefill[0].num_tokens for call in reading] == [32, 32, 16]
    assert all(map(is_ahead, reading))
    assert all(ids(call) == {"a", "b"} for call in reading)
    assert is_ahead(after)
    assert ids(after) == {"a", "b", "new"}


def test_a_prompt_that_had_no_slots_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step sent after it has it among those that go on."""
    world = AheadWorld(1)
    world.begin("a", "b")
    world.send(Submit(request_id="new", prompt=[9] * 10, sampling=LONG))
    step = world.target.step

    def defers(call: VerifyCall) -> VerifyResult:
        result = step(msgspec.structs.replace(call, prefill=[]))
        return msgspec.structs.replace(result, deferred=[item.request_id for item in call.prefill])

    with monkeypatch.context() as patch:
        patch.setattr(world.target, "step", defers)
        while not world.calls[-1].prefill:
            world.answer_one()
        world.answer_one()
        assert "new" in ids(world.calls[-1])
    world.drain()
    world.check_ends()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9])
def test_who_ends_by_its_length_is_in_no_further_step(num_tokens: int) -> None:
    world = AheadWorld(1)
    world.send(Submit(request_id="short", prompt=[3] * 10, sampling=ends(num_tokens)))
    world.drain()
    world.check_ends()
    assert len(world.calls) == num_tokens


def test_nobody_goes_on_beyond_the_models_window() -> None:
    world = AheadWorld(1)
    world.send(Submit(request_id="long", prompt=[3] * 190, sampling=ends(100)))
    world.drain()
    world.check_ends()
    assert len(world.output["long"]) == world.target.max_tokens - 190
    steps = [call for call in world.calls if call.verify]
    assert len(steps) == len(world.output["long"]) - 1
    assert any(map(is_ahead, steps))


def test_those_that_go_on_are_sent_without_those_that_end() -> None:
    world = AheadWorld(1)
    world.send(Submit(request_id="short", prompt=[3] * 10, sampling=ends(6)))
    world.send(Submit(request_id="long", prompt=[4] * 10, sampling=LONG))
    world.drain()
    world.check_ends()
    of_short = [call for call in world.calls if "short" in ids(call)]
    assert len(of_short) <= 5
    assert is_ahead(of_short[-1])
    assert is_ahead(world.calls[world.calls.index(of_short[-1]) + 1])


def test_what_follows_a_stop_token_is_told_to_nobody() -> None:
    world = AheadWorld(1)
    rng = random.Random(5)
    while True:
        request = submit(1, rng, sampling=ends(40, stop_token_ids=(STOP,)))
        if 5 < len(expected_output(request, 200)) < 30:
            break
    world.send(request)
    world.drain()
    world.check_ends()
    check_at_rest(world.core)
    assert world.reason == {"r1": "stop"}
    spec, tokens, _ = world.target.held["r1"]
    assert len(tokens) == spec.prompt_len + len(world.output["r1"]) + 1
    # It is forgotten with the next call, and what it held is free again.
    world.send(Submit(request_id="next", prompt=[3] * 10, sampling=ends(1)))
    assert world.calls[-1].release == ["r1"]
    world.drain()
    assert world.target.free() == world.target.num_slots - 10  # the next one's, which ends likewise
    assert world.core.free_slots == world.target.num_slots


def test_who_is_cancelled_and_comes_again_starts_anew() -> None:
    world = AheadWorld(1)
    world.begin("a", "b")
    for _ in range(4):
        world.answer_one()
    assert world.num_at_target == 2
    world.handle(Cancelled("a"))
    world.send_again("a")
    for number in range(2):  # the verdicts of its life before
        world.answer_one()
        assert world.output.get("a", []) == []
        assert world.core.requests["a"].state is State.PREFILL_SENT
        assert is_ahead(world.calls[-1])
        assert world.calls[-1].release == ([] if number else ["a"])
    world.drain()
    world.check_ends()


def test_what_was_read_of_one_that_is_gone_is_not_taken_for_what_comes_by_its_name() -> None:
    world = AheadWorld(1)
    world.begin("b")
    world.send(Submit(request_id="a", prompt=[5] * 10, sampling=LONG))
    world.answer_one()
    assert world.core.requests["a"].state is State.PREFILL_SENT
    world.handle(Cancelled("a"))
    world.output.pop("a", None)
    del world.reason["a"]
    world.send(Submit(request_id="a", prompt=[8] * 60, sampling=LONG))
    world.answer_one()
    assert [[item.request_id for item in call.prefill] for call in world.calls[-2:]] == [["a"], ["a"]]
    assert world.num_at_target == 2
    world.answer_one()
    assert world.core.requests["a"].num_computed == 0
    assert world.output.get("a", []) == []
    world.drain()
    world.check_ends()
    assert world.core.requests == {}


def test_a_step_that_had_no_slots_for_somebody_is_made_up_for_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = AheadWorld(1)
    world.begin("a", "b")
    step = world.target.step

    def defers(call: VerifyCall) -> VerifyResult:
        served = [item for item in call.verify if item.request_id != "a"]
        return msgspec.structs.replace(step(msgspec.structs.replace(call, verify=served)), deferred=["a"])

    with monkeypatch.context() as patch:
        patch.setattr(world.target, "step", defers)
        world.answer_one()  # sends the step that has no slots
    world.answer_one()
    had = len(world.output["a"])
    world.answer_one()  # the one without slots
    assert len(world.output["a"]) == had
    assert world.core.requests["a"].state is State.VERIFYING
    world.answer_one()
    assert len(world.output["a"]) == had + 1
    world.drain()
    world.check_ends()
    assert world.core.totals.preemptions == 0


def test_who_the_target_does_not_know_is_sent_to_it_again_once() -> None:
    world = AheadWorld(1)
    world.begin("a", "b")
    del world.target.held["a"]
    world.answer_one()  # sends a step that does not know it
    world.answer_one()  # and another
    world.answer_one()
    assert world.core.requests["a"].state is State.PREFILL_SENT
    world.answer_one()
    assert world.core.requests["a"].num_preemptions == 1
    world.drain()
    world.check_ends()


def test_who_comes_again_is_not_taken_for_one_that_the_target_did_not_know() -> None:
    world = AheadWorld(1)
    world.begin("a", "b")
    del world.target.held["a"]
    world.answer_one()
    world.answer_one()
    world.handle(Cancelled("a"))
    world.send_again("a")
    world.drain()
    world.check_ends()
    assert world.core.totals.preemptions == 0


def test_a_lost_target_takes_both_steps_with_it() -> None:
    world = AheadWorld(1)
    world.begin("a", "b")
    assert world.num_at_target == 2
    world.lose("verifier")
    assert world.core.verify_calls.all_outstanding == []
    world.start_target()
    world.drain()
    world.check_ends()


def test_no_more_slots_are_asked_for_than_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    world = AheadWorld(1, num_slots=124)
    deferred: list[str] = []
    step = world.target.step

    def watched(call: VerifyCall) -> VerifyResult:
        result = step(call)
        deferred.extend(result.deferred)
        return result

    monkeypatch.setattr(world.target, "step", watched)
    for name in ("a", "b", "c"):
        world.send(Submit(request_id=name, prompt=[3] * 10, sampling=LONG))
    world.drain()
    world.check_ends()
    assert any(map(is_ahead, world.calls))
    assert world.core.totals.preemptions > 0, "there was room for all"
    assert deferred == []


@pytest.mark.parametrize("num_slots", [124, 125, 126])
def test_slots_that_are_free_with_the_next_call_are_counted(num_slots: int) -> None:
    world = AheadWorld(1, num_slots=num_slots)
    world.begin("a", "b", "c", sampling=ends(50))
    while world.num_at_target == 2:
        assert world.answer_one()
    assert world.core.free_slots < 6
    world.handle(Cancelled("a"))
    assert world.num_at_target == 2
    assert (is_ahead(world.calls[-1]), world.calls[-1].release) == (True, ["a"])
    world.drain()
    world.check_ends(frozenset("a"))
    assert world.core.totals.preemptions == 0


@pytest.mark.parametrize("verb", ["decode", "verify"])
def test_a_rule_that_lets_somebody_wait_is_heeded(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = AheadWorld(1)
    world.begin("a", "b")
    num_calls = len(world.calls)
    rule = type(world.core.batcher.rule)
    monkeypatch.setattr(rule, verb, lambda self, ready, members, context: list(ready)[:1])
    world.drain()
    world.check_ends()
    after = world.calls[num_calls]
    assert (is_ahead(after), len(after.verify)) == (False, 1)


@examples(100)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_random_interruptions_change_no_text(seed: int, data: st.DataObject) -> None:
    world = AheadWorld(seed, data.draw(st.sampled_from(["autoregressive", "flotilla", "smartspec"])))
    interrupt(world, data, share_off=0.5)
