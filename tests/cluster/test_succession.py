"""Changing the policy of an idle cell: workers notice nothing, and nothing is left behind in them."""

from __future__ import annotations

import msgspec
import pytest

from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.events import DrafterReady, RequestArrived
from cluster.policies.registry import make_policy
from cluster.succession import take_over
from tests.cluster.simulated import SimulatedDrafter, submit
from tests.cluster.test_core import World


def core_for(world: World, policy: str) -> SchedulerCore:
    config = world.config.model_copy(
        update={"policy": world.config.policy.model_copy(update={"name": policy})}
    )
    return SchedulerCore(config, make_policy(config.policy), CostModel(DEFAULT_PROFILE))


def change(world: World, core: SchedulerCore) -> None:
    take_over(core, world.core, world.now)
    world.core = core


def serve(world: World, first: int, count: int = 12) -> None:
    for number in range(first, first + count):
        world.send(submit(number, world.rng))
    world.drain()
    world.check_ends()
    assert not world.rejected


def test_requests_served_after_many_changes_get_the_targets_own_text() -> None:
    world = World(5, "adaserve")
    cores = [world.core, core_for(world, "autoregressive"), core_for(world, "flotilla")]
    for turn in range(7):
        change(world, cores[turn % 3])
        serve(world, 12 * turn)


def test_workers_are_told_to_forget_the_requests_of_the_policy_before() -> None:
    world = World(5, "adaserve")
    serve(world, 0)
    before = {"target": set(world.target.held)} | {name: set(d.held) for name, d in world.drafters.items()}
    assert all(before.values()), "some worker holds the last requests until its next call"
    change(world, core_for(world, "autoregressive"))
    change(world, core_for(world, "fixed"))
    serve(world, 20)
    assert not before["target"] & set(world.target.held)
    assert all(not before[name] & set(drafter.held) for name, drafter in world.drafters.items())


def test_call_ids_go_on() -> None:
    world = World(5, "fixed")
    serve(world, 0)
    calls = world.target.calls
    change(world, core_for(world, "fixed"))
    request = submit(50, world.rng)
    world.send(request)
    assert world.core.verify_calls.all_outstanding[0].call_id == calls + 1


def test_a_policy_set_again_keeps_what_it_had_learnt() -> None:
    world = World(5, "fixed")
    serve(world, 0)
    learnt, steps = world.core, world.core.totals.steps
    correction = learnt.cost.correction("good")
    change(world, core_for(world, "autoregressive"))
    serve(world, 20)
    change(world, learnt)
    assert (learnt.totals.steps, learnt.cost.correction("good")) == (steps, correction)


def test_drafters_lost_and_made_in_between_are_known() -> None:
    world = World(5, "fixed")
    first = world.core
    change(world, core_for(world, "autoregressive"))
    world.lose("poor")
    change(world, first)
    assert set(first.pool.drafters) == {"good"}
    change(world, core_for(world, "flotilla"))
    world.start_drafter("poor")
    change(world, first)
    assert set(first.pool.drafters) == {"good", "poor"}
    serve(world, 0)


def test_another_drafter_under_the_same_name_is_taken_for_what_it_is() -> None:
    world = World(5, "fixed")
    first = world.core
    serve(world, 0)
    change(world, core_for(world, "adaserve"))
    world.lose("good")
    world.drafters["good"] = SimulatedDrafter(0.8, world.rng)
    before = world.drafters["good"].capabilities
    less = msgspec.structs.replace(before, max_depth=2, max_tokens=100, has_probabilities=False)
    world.drafters["good"].capabilities = less
    world.handle(DrafterReady("good", less, 2, kind="small", size=3))
    same = first.pool.drafters["poor"]
    change(world, first)
    good = first.pool.drafters["good"]
    assert (good.capabilities, good.max_requests, good.kind, good.size) == (less, 2, "small", 3)
    assert first.pool.kind_of("good") == "small"
    assert first.pool.drafters["poor"] is same, "who was not replaced keeps what is known of it"
    serve(world, 20)


def test_a_busy_cell_keeps_its_policy() -> None:
    world = World(5, "fixed")
    world.handle(RequestArrived(submit(0, world.rng), "a"))
    with pytest.raises(RuntimeError, match="while no request is being served"):
        take_over(core_for(world, "flotilla"), world.core, world.now)


def test_a_cell_without_its_target_keeps_its_policy() -> None:
    world = World(5, "fixed")
    world.lose("verifier")
    with pytest.raises(RuntimeError, match="while the target is running"):
        take_over(core_for(world, "flotilla"), world.core, world.now)
