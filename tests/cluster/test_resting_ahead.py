"""Plain steps of a policy that rests at times: which of them are sent ahead, and what goes on beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.config import PolicyConfig
from cluster.core import SchedulerCore
from cluster.events import Action, Draft, DrafterDraining, Drained
from cluster.planning import StepPlanner
from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.fixed import Fixed
from cluster.requests import Request
from drafters.messages import DraftPlan
from tests.cluster.ahead_world import AheadWorld, ends, is_ahead


class RestsWithin(Fixed):
    """Drafts before some step, and again from another on."""

    def __init__(self, config: PolicyConfig, first: int, until: int) -> None:
        super().__init__(config)
        self.steps = range(first, until)
        self.asked: list[int] = []

    def rests(self, num_requests: int, step: int) -> bool:
        return step in self.steps

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        self.asked.append(context.step)
        return super().plan(batch, context)


class RestingWorld(AheadWorld):
    """Its policy rests from one step to another."""

    def __init__(self, first: int, until: int) -> None:
        self.drained: list[str] = []
        super().__init__(1)
        self.policy = RestsWithin(self.config.policy, first, until)
        self.core = SchedulerCore(self.config, self.policy, self.core.cost)
        self.start_target()
        for name in ("good", "poor"):
            self.start_drafter(name)

    def observe(self, actions: Sequence[Action]) -> None:
        super().observe(actions)
        self.drained += [action.drafter for action in actions if isinstance(action, Drained)]


def test_the_step_in_which_a_policy_rests_no_more_is_not_sent_ahead() -> None:
    world = RestingWorld(0, 20)
    world.begin("a", sampling=ends(60))
    world.drain()
    world.check_ends()
    assert world.policy.asked[0] == 20
    # One call is answered in each step: from the one after the prompt to the last in which it rests.
    assert sum(map(is_ahead, world.calls)) == 20 - 1
    assert not any(map(is_ahead, world.calls[20:]))


def test_a_step_after_one_with_drafts_waits_to_hear_how_many_tokens_that_brought() -> None:
    world = RestingWorld(6, 1000)
    world.begin("a", sampling=ends(60))
    world.drain()
    world.check_ends()
    drafted = [any(item.num_nodes > 1 for item in call.verify) for call in world.calls]
    last = max(place for place, is_drafted in enumerate(drafted) if is_drafted)
    assert not any(map(is_ahead, world.calls[: last + 2]))
    assert all(map(is_ahead, world.calls[last + 2 :]))


def test_a_draining_drafter_is_left_in_steps_that_are_sent_ahead() -> None:
    world = RestingWorld(0, 1000)
    world.begin("a", sampling=ends(60))
    name = world.core.requests["a"].drafter
    assert name
    world.handle(DrafterDraining(name))
    for _ in range(6):
        world.answer_one()
    assert "a" in world.core.requests
    assert world.drained == [name]


def test_idle_drafters_may_read_beside_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = RestingWorld(0, 1000)
    served: list[int] = []

    def read_ahead(self: StepPlanner, requests: Sequence[Request], *args: object) -> list[Draft]:
        served.append(len(requests))
        return []

    monkeypatch.setattr(StepPlanner, "read_ahead", read_ahead)
    world.begin("a", "b")
    world.drain()
    world.check_ends()
    # The first call reads a prompt; with its answer a plain step is sent, and one ahead.
    assert len(world.calls) - 2 <= len(served) <= len(world.calls)
