"""Plain steps of policies that plan every step are sent ahead, and none that they would draft in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from cluster.cost_model import DEFAULT_PROFILE
from cluster.invariants import check_at_rest
from cluster.linear_cost import LinearCost
from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.planned_early import PlannedEarly
from cluster.stream_messages import Objective
from drafters.messages import DraftPlan
from tests.cluster import test_core
from tests.cluster.ahead_world import AheadWorld, is_ahead
from tests.cluster.policies.batches import context, request

POLICIES = ["smartspec", "specserve"]


def world_of(policy: str, draft_s: float, monkeypatch: pytest.MonkeyPatch) -> AheadWorld:
    """Two requests, and drafters whose layers take so long, served to their end."""
    drafters = {name: LinearCost(delta=draft_s) for name in ("good", "poor")}
    monkeypatch.setattr(
        test_core, "DEFAULT_PROFILE", msgspec.structs.replace(DEFAULT_PROFILE, drafters=drafters)
    )
    world = AheadWorld(1, policy)
    # SpecServe always drafts one layer, unless that makes somebody late.
    world.begin("a", "b", objective=Objective(tpot_ms=500.0))
    world.drain()
    world.check_ends()
    check_at_rest(world.core)
    return world


@pytest.mark.parametrize("policy", POLICIES)
def test_where_drafting_is_too_dear_the_target_does_not_wait(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(policy, 1.0, monkeypatch)
    decoding = [call for call in world.calls if call.verify]
    assert sum(map(is_ahead, decoding)) >= len(decoding) - 2
    assert world.core.totals.verified_tokens == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_where_it_is_cheap_every_step_is_drafted_for(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(policy, 1e-5, monkeypatch)
    assert not any(map(is_ahead, world.calls))
    assert world.core.totals.accepted_tokens > 10


class Planned(PlannedEarly):
    """Drafts as deep as told."""

    depths: tuple[int, ...] = ()

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        assert len(batch) == len(self.depths)
        return [DraftPlan(depth=depth) for depth in self.depths]


def test_it_rests_in_the_step_it_was_asked_about_and_for_no_fewer_requests() -> None:
    policy = Planned()
    assert not policy.rests(2, 7)
    batch, next_step = [request("a"), request("b")], replace(context(), step=7)
    policy.depths = (0, 1)
    policy.look_ahead(batch, next_step)
    assert not policy.rests(2, 7)
    policy.depths = (0, 0)
    policy.look_ahead(batch, next_step)
    assert [policy.rests(2, step) for step in (6, 7, 8)] == [False, True, False]
    assert [policy.rests(count, 7) for count in (1, 2, 3)] == [False, True, True]
