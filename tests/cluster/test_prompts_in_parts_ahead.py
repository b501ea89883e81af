"""Prompts longer than a step takes are read in steps sent ahead, whatever comes of the part before."""

from __future__ import annotations

import msgspec
import pytest

from cluster.cost_model import CostModel
from cluster.invariants import check_at_rest
from cluster.requests import State
from cluster.stream_messages import Submit
from tests.cluster.ahead_world import LONG, AheadWorld, ends, ids
from verifier.messages import VerifyCall, VerifyResult


def parts_of(world: AheadWorld, name: str) -> list[int]:
    return [item.num_tokens for call in world.calls for item in call.prefill if item.request_id == name]


def test_a_prompt_alone_is_read_without_waiting() -> None:
    world = AheadWorld(1, prefill_chunk=32)
    world.send(Submit(request_id="long", prompt=[9] * 120, sampling=ends(3)))
    assert world.num_at_target == 2
    for _ in range(3):
        assert world.answer_one()
        assert world.num_at_target == 2
    world.drain()
    world.check_ends()
    check_at_rest(world.core)
    assert parts_of(world, "long") == [32, 32, 32, 24]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_part_that_has_no_slots_is_read_later(
    part: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part after it was sent already."""
    world = AheadWorld(1, prefill_chunk=32)
    if beside:
        world.begin("a")
    step, parts = world.target.step, []

    def defers(call: VerifyCall) -> VerifyResult:
        parts.extend(item.request_id for item in call.prefill if item.request_id == "long")
        if not call.prefill or len(parts) != part + 1:
            return step(call)
        result = step(msgspec.structs.replace(call, prefill=[]))
        return msgspec.structs.replace(result, deferred=["long"])

    monkeypatch.setattr(world.target, "step", defers)
    world.send(Submit(request_id="long", prompt=[9] * 90, sampling=LONG))
    world.drain()
    world.check_ends()
    check_at_rest(world.core)
    assert sum(parts_of(world, "long")) >= 90


def test_a_prompt_whose_beginning_is_shared_ends_sooner_than_it_seemed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first part is the last one, and the part after that was sent already."""
    world = AheadWorld(1, prefill_chunk=32)
    world.begin("a")
    step = world.target.step

    def shares(call: VerifyCall) -> VerifyResult:
        first = [item for item in call.prefill if item.request_id == "long" and item.spec is not None]
        if first:
            whole = msgspec.structs.replace(first[0], num_tokens=90)
            call = msgspec.structs.replace(call, prefill=[whole])
        return step(call)

    monkeypatch.setattr(world.target, "step", shares)
    world.send(Submit(request_id="long", prompt=[9] * 90, sampling=LONG))
    while not world.output.get("long"):
        assert world.answer_one()
    assert parts_of(world, "long") == [32, 32]
    assert world.core.requests["long"].state is State.READY
    world.answer_one()
    assert ids(world.calls[-1]) == {"a", "long"}
    world.drain()
    world.check_ends()
    check_at_rest(world.core)
    assert world.core.totals.preemptions == 0


def test_what_is_expected_of_the_next_part_is_of_where_it_begins() -> None:
    world = AheadWorld(1, prefill_chunk=32)
    world.send(Submit(request_id="long", prompt=[9] * 120, sampling=LONG))
    first, second = world.core.verify_calls.all_outstanding
    assert (first.prefilling, second.prefilling) == ({"long": 32}, {"long": 32})
    assert world.core.requests["long"].num_computed == 0
    cost: CostModel = world.core.cost
    assert second.parts.profile_s == cost.profile.target.seconds(1, 32, 32, 32 * (32 + 16))
