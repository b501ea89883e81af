"""A drafter that is given up: nobody new comes, those on it move on, and then it is said that it is free."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.events import Action, Draft, DrafterDraining, Drained
from cluster.requests import State
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import submit
from tests.cluster.test_core import World


class DrainingWorld(World):
    """Notes who was drained, and to whom drafts were sent."""

    def __init__(self, seed: int, policy: str) -> None:
        self.drained: list[str] = []
        super().__init__(seed, policy)

    def drain_drafter(self, name: str) -> None:
        self.handle(DrafterDraining(name))

    def observe(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Drained(name):
                    assert name not in self.drained
                    self.drained.append(name)
                    assert not self.core.pool.drafters[name].served
                    assert not self.core.pool.drafters[name].outstanding
                case Draft(name, call):
                    if self.core.pool.drafters[name].is_draining:
                        assert all(item.plan.depth == 0 for item in call.items)


def test_requests_leave_a_draining_drafter_and_it_is_said_once() -> None:
    world = DrainingWorld(3, "fixed")
    for number in range(8):
        world.send(submit(number, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=60)))
    while not any(request.drafter == "good" for request in world.core.running.values()):
        assert world.answer_one()
    world.drain_drafter("good")
    steps = world.core.totals.steps
    while "good" not in world.drained:
        assert world.answer_one()
    assert world.core.totals.steps <= steps + 2
    world.drain()
    world.check_ends()
    assert world.drained == ["good"]
    world.lose("good")
    assert world.drained == ["good"]


def test_an_idle_drafter_is_drained_at_once_and_unknown_names_are_ignored() -> None:
    world = DrainingWorld(1, "flotilla")
    world.drain_drafter("nobody")
    assert world.drained == []
    world.drain_drafter("poor")
    assert world.drained == ["poor"]
    world.send(submit(0, world.rng))
    world.drain()
    world.check_ends()


def test_requests_of_a_lost_drafter_are_read_by_another_before_the_next_step() -> None:
    world = DrainingWorld(5, "fixed")
    for number in range(6):
        world.send(submit(number, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=60)))
    while not any(
        request.drafter == "good" and request.state in (State.DRAFTING, State.VERIFYING)
        for request in world.core.running.values()
    ):
        assert world.answer_one()
    served = set(world.core.pool.drafters["good"].served)
    world.lose("good")
    poor = world.core.pool.drafters["poor"]
    mine = [world.core.requests[i] for i in served if world.core.requests[i].is_running]
    assert mine
    for request in mine:
        assert request.drafter in ("poor", ""), "it moved on in the same event"
        if request.drafter and request.state is not State.READY:
            assert request.request_id in poor.known
    assert any(request.drafter == "poor" for request in mine)
    world.drain()
    world.check_ends()
