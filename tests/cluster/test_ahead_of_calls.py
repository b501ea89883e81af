"""For how long drafters go on by themselves: until their next call should have come, and not much longer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import pytest

from cluster.cost_model import CostModel, CostProfile
from cluster.drafting_time import AHEAD_TIMES, LEAST_AHEAD_S, seconds_ahead
from cluster.events import Action, Draft, Verify
from cluster.linear_cost import LinearCost
from cluster.policies.base import DecodeRequest
from cluster.policies.decode_batch import DecodeBatch
from drafters.messages import DraftCall, DraftPlan
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import submit
from tests.cluster.test_core import World

COST = CostProfile(target=LinearCost(gamma=1e-3, delta=1e-2))


def view(rate: float) -> DecodeRequest:
    return DecodeRequest("a", "small", 0, 0.0, None, max_draft=8, max_width=4, num_context=0, rate=rate)


def test_until_the_step_that_is_drafted_for_should_be_verified() -> None:
    plans = [DraftPlan(depth=3, width=2), DraftPlan(depth=1, width=1), DraftPlan(depth=0)]
    found = seconds_ahead(CostModel(COST), DecodeBatch([view(0.5)] * 3), plans, 2e-3)
    # Of the first draft 1/2 + 1/4 + 1/8 tokens should be accepted; of the second there is no more than one.
    rows = round(3 + (1 + 7 / 8) + 1)
    assert found == pytest.approx(AHEAD_TIMES * (1e-2 + rows * 1e-3 + 2e-3))
    whole = seconds_ahead(CostModel(COST), DecodeBatch([view(1.0)]), [DraftPlan(depth=8)], 0.0)
    assert whole == pytest.approx(AHEAD_TIMES * (1e-2 + 9e-3))
    nothing = CostModel(CostProfile(target=LinearCost()))
    assert seconds_ahead(nothing, DecodeBatch([view(0.5)]), plans[:1], 0.0) == LEAST_AHEAD_S


class Watched(World):
    """Notes draft calls."""

    def __init__(self, policy: str, **scheduler: object) -> None:
        self.calls: list[DraftCall] = []
        self.verify_s: list[float] = []
        super().__init__(1, policy, **scheduler)

    def observe(self, actions: Sequence[Action]) -> None:
        super().observe(actions)
        self.calls += [action.call for action in actions if isinstance(action, Draft)]
        sent = self.core.planned_ahead.calls.outstanding
        if sent is not None and sent.trees and any(isinstance(action, Verify) for action in actions):
            self.verify_s.append(sent.predicted_s)


@pytest.mark.parametrize("draft_ahead", [0, 1])
def test_who_has_a_core_may_go_on_for_some_time_and_who_only_reads_may_not(draft_ahead: int) -> None:
    world = Watched("fixed", draft_ahead=draft_ahead)
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    world.send(submit(0, world.rng, prompt=[1, 2, 3], sampling=sampling))
    world.drain()
    drafting = {bool(call.ahead_s) for call in world.calls if any(item.plan.depth for item in call.items)}
    assert drafting == {draft_ahead > 0}
    reading = [call.ahead_s for call in world.calls if all(item.plan.depth == 0 for item in call.items)]
    assert reading
    assert set(reading) == {0.0}


@pytest.mark.parametrize("policy", ["fixed", "flotilla", "adaserve"])
@pytest.mark.parametrize("num_requests", [1, 4, 8])
def test_no_drafter_goes_on_for_much_longer_than_the_target_works(policy: str, num_requests: int) -> None:
    world = Watched(policy, draft_ahead=1, async_scheduling=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    for number in range(num_requests):
        world.send(submit(number, world.rng, prompt=[1 + number, 2, 3], sampling=sampling))
    world.drain()
    ahead = [call.ahead_s for call in world.calls if call.ahead_s]
    assert len(ahead) > 5
    ratio = median(ahead) / median(world.verify_s)
    assert 1.2 < ratio < 2.4, ratio
