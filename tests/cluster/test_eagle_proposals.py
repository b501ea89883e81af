"""What EAGLE is asked for: beams as the last plan was, which end where that would have ended drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import pytest

from cluster.config import PolicyConfig
from cluster.core import SchedulerCore
from cluster.cost_model import CostProfile
from cluster.head_proposals import PROBE_STEPS
from cluster.linear_cost import LinearCost
from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.fixed import Fixed
from cluster.policies.probing import PROBE_RUN
from drafters.messages import DraftPlan
from tests.cluster.ahead_world import is_ahead
from tests.cluster.heads_world import (
    CHEAP,
    DEAR,
    LAYERS,
    HeadsWorld,
    asked,
    drafted,
)


class Deepens(Fixed):
    """Chains of two or three tokens by its configuration, from some step on as long as they can be."""

    def __init__(self, config: PolicyConfig, from_step: int) -> None:
        super().__init__(config)
        self._from_step = from_step

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        if context.step < self._from_step:
            return super().plan(batch, context)
        return [DraftPlan(depth=request.max_draft) for request in batch]


def may_draft_deeper(depth: int, from_step: int = 1 << 20, *, plans_ahead: bool = True) -> HeadsWorld:
    """Of a policy that might, by its configuration, draft as deep as EAGLE goes."""
    world = HeadsWorld("smartspec", CHEAP, 0.95, kind="eagle", max_width=1)
    config = world.core.config
    policy = Deepens(config.policy.model_copy(update={"fixed_depth": depth}), from_step)
    policy.plans_ahead = plans_ahead
    world.core = SchedulerCore(config, policy, world.core.cost)
    return world


def test_of_eagle_a_beam_of_the_planned_shape_is_asked_and_a_layer_more_where_all_is_used() -> None:
    world = may_draft_deeper(3, plans_ahead=False)
    world.submit(0, 200)
    world.run(30)
    wanted = [found["r0"] for found in map(asked, world.calls) if found]
    assert wanted[0] == (LAYERS, 1)  # how wide is for the policy to say
    # Three of six were used, and then three of three: a fourth is offered, and not taken.
    assert wanted[1:5] == [(3, 1), (4, 1), (3, 1), (4, 1)]
    for number in (1, 2):  # beside it, and after it
        world.submit(number, 60)
        world.run(60)
        newcomer = next(found[f"r{number}"] for found in map(asked, world.calls) if f"r{number}" in found)
        assert newcomer in {(3, 1), (4, 1)}  # as the others, not all there is
        (first,) = [
            call for call in world.calls if f"r{number}" in {item.request_id for item in call.prefill}
        ]
        assert f"r{number}" in asked(first)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_policy_that_would_take_more_is_asked_for_more(is_ahead: bool) -> None:
    """At once where it plans before there are proposals; else it gets to see one layer more in each step."""
    world = may_draft_deeper(2, from_step=20, plans_ahead=is_ahead)
    world.submit(0, 200)
    world.run(34)
    wanted = [found["r0"][0] for found in map(asked, world.calls) if found]
    first = next(place for place, layers in enumerate(wanted[1:], 1) if layers > 3 - is_ahead)
    growing = [6, 6, 6] if is_ahead else [4, 5, 6]
    assert 17 <= first <= 21
    assert wanted[first : first + 3] == growing
    assert set(wanted[first + 3 :]) == {6}
    assert set(wanted[1:first]) == ({2} if is_ahead else {2, 3})


def test_a_policy_that_plans_ahead_needs_no_proposals_to_find_that_drafts_pay() -> None:
    world = may_draft_deeper(0, from_step=20)
    world.submit(0, 200)
    world.run(40)
    wanted = [sum(layers for layers, _ in asked(call).values()) for call in world.calls]
    assert wanted[2:18] == [0] * 16
    assert wanted[21:] == [6] * (len(wanted) - 21)
    assert all(map(drafted, world.calls[23:]))


def test_a_beam_that_ended_for_want_of_likely_paths_is_asked_for_as_deep_again() -> None:
    world = HeadsWorld("flotilla", CHEAP, 0.95, kind="eagle", ends_at=2)
    world.submit(0, 200)
    world.run(30)
    assert asked(world.calls[-1])["r0"][0] == LAYERS
    assert all(map(drafted, world.calls[5:]))


def test_a_beam_ends_by_what_the_last_plan_said_of_likely_paths_and_tokens() -> None:
    world = HeadsWorld("flotilla", CHEAP, 0.95, kind="eagle")
    world.submit(0, 200)
    world.run(30)
    (item,) = world.calls[-1].verify
    plan = item.plan  # sent ahead of the proposals that it is for
    assert plan is not None
    assert -20 < plan.stop_logp < 0
    assert -20 < plan.least_forward_logp < 0
    assert item.least_logp == max(plan.stop_logp, plan.least_forward_logp)
    world = HeadsWorld("threshold", CHEAP, 0.95, kind="eagle", confidence_threshold=0.4)
    world.submit(0, 200)
    world.run(30)
    assert world.calls[-1].verify[0].stop_token_logp == math.log(0.4)
    world.submit(1, 200)
    world.run(4)
    (first,) = [item for call in world.calls for item in call.prefill if item.request_id == "r1"]
    assert (first.num_candidates, first.stop_token_logp) == (1, math.log(0.4))


def test_beams_end_by_the_rule_of_the_draft_call_before() -> None:
    world = HeadsWorld("specserve", CHEAP, 0.95, kind="eagle")
    for number in range(4):
        world.submit(number, 200)
    world.run(2)
    assert world.calls[1].stop_rule is None  # nothing was planned for yet
    for _ in range(10):
        world.run(1)
        rule = world.calls[-1].stop_rule
        assert rule is not None
        assert rule == world.rules[-1]
        assert rule.num_requests == 4
    world.submit(4, 60)  # who comes is drafted for together with the others
    world.run(3)
    (first,) = [call for call in world.calls if "r4" in {item.request_id for item in call.prefill}]
    assert asked(first)["r4"]
    assert first.stop_rule in world.rules
    world = HeadsWorld("specserve", CHEAP, 0.95, kind="eagle")
    for number in range(4):
        world.submit(number, 60)
    world.run()
    world.submit(5, 60)
    world.run(1)  # alone: what paid beside three others says nothing of it
    assert asked(world.calls[-1])["r5"]
    assert world.calls[-1].stop_rule is None
    heads = HeadsWorld("specserve", CHEAP, 0.95)
    heads.submit(0, 60)
    heads.run(20)
    assert heads.rules[-1] is not None
    assert not any(call.stop_rule for call in heads.calls)


def test_eagle_is_asked_for_as_wide_a_beam_as_the_policy_takes_for_so_many() -> None:
    world = HeadsWorld("adaserve", CHEAP, 0.9, kind="eagle", max_width=3, draft_budget=6)
    world.submit(0, 300)
    world.run(20)
    assert asked(world.calls[-1])["r0"][1] == 3
    for number in range(1, 4):
        world.submit(number, 60)
    world.run(8)
    assert {width for _, width in asked(world.calls[-1]).values()} == {1}
    world.run(60)
    assert asked(world.calls[-1])["r0"][1] == 3


def test_while_drafting_does_not_pay_eagle_is_asked_once_in_many_steps() -> None:
    world = HeadsWorld("smartspec", DEAR, 0.3, kind="eagle")
    for number in range(8):
        world.submit(number, 400)
    world.run()
    later = world.calls[PROBE_STEPS:]
    asking = [call for call in later if asked(call)]
    assert len(later) / PROBE_STEPS / 2 <= len(asking) <= 2 * len(later) / PROBE_STEPS + 1
    assert all(len(asked(call)) == 8 for call in asking)


@pytest.mark.parametrize("kind", ["eagle", "heads"])
def test_proposals_are_asked_for_as_soon_as_a_look_finds_that_drafts_pay(
    kind: Literal["heads", "eagle"],
) -> None:
    """A policy that tries plain steps rests for as long; what it planned last was without drafts."""
    target, head = LinearCost(delta=5e-3, gamma=1e-4), LinearCost(delta=2e-4, rho=1e-3)
    profile = CostProfile(target=target, drafters={"heads": head}, overhead_s=2e-3)
    world = HeadsWorld("flotilla", profile, 0.5, kind=kind)
    world.submit(0, 900)
    world.run()
    assert any(map(is_ahead, world.calls))
    plain = "".join(" " if asked(call) or drafted(call) else "p" for call in world.calls).split()
    tries = [steps for steps in plain if len(steps) > 1]
    assert tries
    # A try, and the step in which the last proposals for plain steps are verified.
    assert max(map(len, tries)) <= PROBE_RUN + 1


def test_who_comes_back_to_eagle_brings_no_rule_of_old() -> None:
    world = HeadsWorld("specserve", CHEAP, 0.95, kind="eagle")
    for number in range(2):
        world.submit(number, 400)
    world.run(10)
    heads, request = world.core.planner.heads, world.core.requests["r0"]
    rule, last = world.calls[-1].stop_rule, heads._plans["r0"]
    assert rule is not None
    old = msgspec.structs.replace(rule, base_s=9.0)
    heads._plans["r0"] = last._replace(step=last.step - 100, stop_rule=old)
    assert heads.wanted(request, 2, 0).stop_rule == rule
