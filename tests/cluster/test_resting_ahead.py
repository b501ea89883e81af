"""Plain steps of a policy that rests at times: which of them are sent ahead, and what goes on beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.config import PolicyConfig
from cluster.core import SchedulerCore
from cluster.events import Action, Draft, DrafterDraining, DrafterReady, Drained, Tick
from cluster.planning import StepPlanner
from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.fixed import Fixed
from cluster.requests import Request
from drafters.messages import DraftPlan
from selector.protocol import PoolView, RequestView
from tests.cluster.ahead_world import AheadWorld, ends, is_ahead
from tests.cluster.simulated import SimulatedDrafter, SimulatedTarget


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


@pytest.mark.parametrize("sends_ahead", [True, False])
def test_prompts_that_come_in_a_rest_are_read(sends_ahead: bool) -> None:
    """Else who comes in a rest is not drafted for after it, and for want of drafts the policy rests again."""
    world = RestingWorld(0, 1000)
    scheduler = world.config.scheduler.model_copy(update={"async_scheduling": sends_ahead})
    config = world.config.model_copy(update={"scheduler": scheduler})
    world.core = SchedulerCore(config, world.policy, world.core.cost)
    world.start_target()
    for name in ("good", "poor"):
        world.start_drafter(name)
    names = [f"r{number}" for number in range(8)]
    world.begin(*names, sampling=ends(60))
    for _ in range(3):
        world.answer_one()
    assert world.core.planner.num_running == len(names)
    assert all(world.core.planner.may_read(world.core.requests[name]) for name in names)


class LooksFurther(RestsWithin):
    """Looks before its rest ends, and finds so many times that it goes on."""

    def __init__(self, config: PolicyConfig, until: int, num_rests: int) -> None:
        super().__init__(config, 0, until)
        self.num_rests = num_rests
        self.looked: list[int] = []

    def look_ahead(self, batch: Sequence[DecodeRequest], context: StepContext) -> None:
        assert all(request.max_draft > 0 for request in batch), "as if all had been read and proposed for"
        self.looked.append(context.step)
        if len(self.looked) <= self.num_rests:
            self.steps = range(self.steps.start, context.step + 10)


class LookingWorld(RestingWorld):
    """Its policy looks ahead."""

    def __init__(self, until: int, num_rests: int) -> None:
        super().__init__(0, until)
        self.policy = LooksFurther(self.config.policy, until, num_rests)
        self.core = SchedulerCore(self.config, self.policy, self.core.cost)
        self.start_target()
        for name in ("good", "poor"):
            self.start_drafter(name)


def test_a_policy_that_looks_before_its_rest_ends_keeps_steps_going_ahead() -> None:
    world = LookingWorld(10, 3)
    world.begin("a", sampling=ends(70))
    world.drain()
    world.check_ends()
    policy = world.policy
    assert isinstance(policy, LooksFurther)
    # Where each rest would have ended, until a look finds that drafts pay; in that step it is asked.
    assert policy.looked[:4] == [10, 20, 30, 40]
    assert policy.asked[0] == 40
    assert sum(map(is_ahead, world.calls[:41])) == 40 - 1


def test_it_looks_once_for_a_step_whatever_else_happens_meanwhile() -> None:
    world = LookingWorld(3, 0)
    world.begin("a", sampling=ends(70))
    policy = world.policy
    assert isinstance(policy, LooksFurther)
    while not policy.looked:
        world.answer_one()
    assert policy.looked == [3]
    for _ in range(3):
        world.handle(Tick())
    assert policy.looked == [3]
    world.drain()
    world.check_ends()
    assert len(policy.looked) == len(set(policy.looked))


def test_a_look_is_no_slot_of_a_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody drafts in the step, and nothing is observed of it: a bandit would explore in vain."""
    world = LookingWorld(10, 3)
    selector, slots = world.core.pool.selector, 0
    assign = selector.assign

    def watched(requests: Sequence[RequestView], pool: PoolView) -> dict[str, str]:
        nonlocal slots
        slots += any(request.is_drafting for request in requests)
        return assign(requests, pool)

    monkeypatch.setattr(selector, "assign", watched)
    world.begin("a", sampling=ends(70))
    world.drain()
    world.check_ends()
    policy = world.policy
    assert isinstance(policy, LooksFurther)
    assert policy.looked
    assert slots == len(policy.asked)


class OutgrowingWorld(AheadWorld):
    """Its target takes longer sequences than its drafters."""

    def make_target(self, num_slots: int) -> SimulatedTarget:
        return SimulatedTarget(num_slots, max_tokens=400)


@pytest.mark.parametrize("policy", ["fixed", "adaserve", "flotilla"])
def test_who_has_outgrown_all_drafters_goes_on_with_any_policy(policy: str) -> None:
    world = OutgrowingWorld(1, policy)
    world.begin("a", sampling=ends(300))
    (longest,) = {drafter.capabilities.max_tokens for drafter in world.drafters.values()}
    while world.core.requests["a"].num_tokens <= longest:
        assert world.answer_one()
    before = len(world.calls)
    world.drain()
    world.check_ends()
    assert len(world.calls) - before > 90
    assert all(map(is_ahead, world.calls[before:]))


@pytest.mark.parametrize("num_others", [0, 1])
def test_few_of_whom_none_finds_a_place_at_a_drafter_go_on(num_others: int) -> None:
    """The default policy looks now and then whether they do."""
    world = AheadWorld(1, "flotilla")
    for name in list(world.drafters):
        world.lose(name)
    world.drafters["full"] = SimulatedDrafter(0.9, world.rng)
    world.handle(DrafterReady("full", world.drafters["full"].capabilities, 0))
    names = ["a", "b"][: 1 + num_others]
    world.begin(*names, sampling=ends(100))
    world.drain()
    world.check_ends()
    assert sum(map(is_ahead, world.calls)) > 90


def test_drafters_drain_also_where_the_policy_never_rests() -> None:
    """Without them steps are sent ahead, and nobody is assigned a drafter any more."""
    world = AheadWorld(1, "fixed")
    world.begin("a", sampling=ends(60))
    assert world.calls[-1].verify[0].num_nodes == 1
    for name in world.drafters:
        world.handle(DrafterDraining(name))
    for _ in range(6):
        assert world.answer_one()
    assert is_ahead(world.calls[-1])
    assert all(drafter.is_drained for drafter in world.core.pool.drafters.values())
    world.drain()
    world.check_ends()
