"""For how long drafters go on by themselves: until their next call should have come, and not much longer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.cost_model import CostModel, CostProfile
from cluster.drafting_time import AHEAD_TIMES, seconds_ahead
from cluster.events import Action, Draft
from cluster.linear_cost import LinearCost
from cluster.policies.base import DecodeRequest
from cluster.policies.decode_batch import DecodeBatch
from drafters.messages import DraftCall, DraftPlan
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import submit
from tests.cluster.test_core import World

COST = CostProfile(target=LinearCost(gamma=1e-3, delta=1e-2))


def test_until_the_step_that_is_drafted_for_should_be_verified() -> None:
    view = DecodeRequest("a", "small", 0, 0.0, None, max_draft=8, max_width=4, num_context=0, rate=0.5)
    batch = DecodeBatch([view, view])
    plans = [DraftPlan(depth=3, width=2), DraftPlan(depth=0)]
    found = seconds_ahead(CostModel(COST), batch, plans, 2e-3)
    assert found == pytest.approx(AHEAD_TIMES * (1e-2 + (2 + 6) * 1e-3 + 2e-3))


class Watched(World):
    """Notes draft calls."""

    def __init__(self, **scheduler: object) -> None:
        self.calls: list[DraftCall] = []
        super().__init__(1, "fixed", **scheduler)

    def observe(self, actions: Sequence[Action]) -> None:
        super().observe(actions)
        self.calls += [action.call for action in actions if isinstance(action, Draft)]


@pytest.mark.parametrize("draft_ahead", [0, 1])
def test_who_has_a_core_may_go_on_for_some_time_and_who_only_reads_may_not(draft_ahead: int) -> None:
    world = Watched(draft_ahead=draft_ahead)
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    world.send(submit(0, world.rng, prompt=[1, 2, 3], sampling=sampling))
    world.drain()
    drafting = {bool(call.ahead_s) for call in world.calls if any(item.plan.depth for item in call.items)}
    assert drafting == {draft_ahead > 0}
    assert all(call.ahead_s < 1.0 for call in world.calls)
    reading = [call.ahead_s for call in world.calls if all(item.plan.depth == 0 for item in call.items)]
    assert reading
    assert set(reading) == {0.0}
