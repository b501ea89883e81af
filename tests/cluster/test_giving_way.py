"""Requests that give way, or find no room: what they hold meanwhile, and what it is to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.events import Action, Cancelled, DrafterDraining, Drained, Reject, Verify, VerifyDone, WorkerLost
from cluster.requests import State
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import submit
from tests.cluster.test_core import World
from verifier.messages import VerifyResult

LONG = SamplingParams(temperature=0.0, max_tokens=140)


class WatchedWorld(World):
    """Keeps what the scheduler has said."""

    def __init__(self, seed: int, policy: str, **scheduler: Any) -> None:
        self.told: list[Action] = []
        super().__init__(seed, policy, **scheduler)

    def observe(self, actions: Sequence[Action]) -> None:
        self.told += actions


def test_the_drafter_of_who_gave_way_is_free_for_who_runs() -> None:
    """As many places as may run, and all of them taken by less urgent requests."""
    world = World(1, "fixed", num_slots=2000, batching="priority")
    world.lose("poor")
    world.core.config.scheduler.__dict__["max_running"] = 6
    for name, priority in (("idle", 5), ("urgent", 0)):
        for number in range(6):
            world.send(
                Submit(
                    request_id=f"{name}{number}", prompt=[7 + number] * 5, sampling=LONG, priority=priority
                )
            )
        while not all(r.first_token_at for r in world.core.requests.values() if name in r.request_id):
            assert world.answer_one()
    for _ in range(20):
        world.answer_one()
    running = world.core.running.values()
    assert {request.request_id[:-1] for request in running} == {"urgent"}
    assert {request.drafter for request in running} == {"good"}
    world.drain()
    world.check_ends()


def test_a_drafter_that_leaves_does_not_wait_for_who_waits() -> None:
    world = WatchedWorld(1, "fixed")
    world.lose("poor")
    world.send(submit(0, world.rng, sampling=LONG))
    request = world.core.requests["r0"]
    while request.state is not State.VERIFYING or not request.drafter:
        assert world.answer_one()
    world.answers = [one for one in world.answers if isinstance(one, VerifyDone)]  # it owes no answer
    world.core.pool.drafters["good"].outstanding.clear()
    world.handle(DrafterDraining("good"))
    assert Drained("good") not in world.told  # its tree is verified
    world.handle(WorkerLost("verifier"))
    assert Drained("good") in world.told


def test_a_request_that_the_target_had_no_room_to_open_is_opened_again() -> None:
    world = WatchedWorld(1, "autoregressive", async_scheduling=False)
    world.send(submit(0, world.rng))
    (first,) = [action.call for action in world.told if isinstance(action, Verify)]
    # What the real target answers and keeps: nothing of the request.
    world.target.held.clear()
    answer = VerifyResult(call_id=first.call_id, deferred=["r0"], free_slots=world.target.free())
    world.answers = [one for one in world.answers if not isinstance(one, VerifyDone)]
    world.handle(VerifyDone(answer))
    again = [action.call for action in world.told if isinstance(action, Verify)][1]
    spec, before = again.prefill[0].spec, first.prefill[0].spec
    assert spec is not None
    assert before is not None
    assert spec.tokens == before.tokens
    world.drain()
    world.check_ends()
    assert world.core.totals.preemptions == 0


def test_who_has_no_room_in_a_target_that_came_back_smaller_is_in_nobodys_way() -> None:
    """On another GPU `num_slots: auto` may be less. Sent there again and again, it would keep others out."""
    world = WatchedWorld(1, "fixed")
    for name, num_prompt in (("begun", 100), ("short", 5)):
        world.send(Submit(request_id=name, prompt=[7] * num_prompt, sampling=LONG))
    while not world.core.requests["begun"].output:
        assert world.answer_one()
    world.send(Submit(request_id="new", prompt=[7] * 100, sampling=LONG))
    world.lose("verifier")
    begun = list(world.core.requests["begun"].output)
    world.target.num_slots = 90
    world.start_target()
    assert world.reason == {"begun": "length"}
    assert world.output["begun"] == begun
    assert world.rejected == {"new": "prompt_too_long"}
    (told,) = [action.rejection for action in world.told if isinstance(action, Reject)]
    assert told.message.endswith("(The model takes 200; the KV pool of this server holds no more.)")
    world.drain()
    assert world.reason.keys() == {"begun", "short"}
    assert not world.core.requests


def test_nobody_gives_way_for_slots_that_are_free_with_the_next_call() -> None:
    """The target has not heard yet that one has left; it will before the next call takes any slots."""
    world = World(1, "autoregressive", num_slots=203)
    for name in ("a", "b", "c"):
        world.send(Submit(request_id=name, prompt=[7] * 5, sampling=LONG))
    while world.target.free() >= 2:
        assert world.answer_one()
    assert world.core.totals.preemptions == 0
    world.handle(Cancelled("a"))
    while "a" in world.target.held:
        assert world.answer_one()  # what it says is free is too little for the two that are left
        assert world.core.totals.preemptions == 0
    assert world.target.free() >= 50
