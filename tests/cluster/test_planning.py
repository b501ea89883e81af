"""What the step planner learns of whole iterations, and of drafts that are not verified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cluster.batching.iteration import Iteration
from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.policies.base import DecodeRequest, Int32, StepContext
from cluster.policies.fixed import Fixed
from cluster.policies.registry import make_policy
from cluster.step_overhead import StepOverhead
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.cluster.simulated import submit
from tests.cluster.test_core import World
from verifier.messages import Verdict, VerifyResult

STEP_S = 0.012
ANSWER = VerifyResult(call_id=1, verdicts=[Verdict(request_id="r", tokens=[1])], forward_seconds=0.01)


def test_after_a_pause_of_the_machine_steps_are_soon_expected_to_take_what_they_take() -> None:
    """Else every request seems late for long: needs are by it, and best effort gives way by it."""
    config = FlotillaConfig.model_validate({"target": {"path": "unused"}})
    planner = SchedulerCore(config, make_policy(config.policy), CostModel(DEFAULT_PROFILE)).planner

    def iterate(seconds: float, times: int = 1) -> None:
        for _ in range(times):
            planner.measure_iteration(Iteration(seconds, 0.0, seconds), ANSWER)

    iterate(STEP_S, 100)
    iterate(60.0)
    assert planner.step_s < 2.0 * STEP_S
    iterate(STEP_S, 20)
    assert planner.step_s < 1.2 * STEP_S
    # Steps that stay longer are believed in as many.
    iterate(10.0 * STEP_S, 30)
    assert planner.step_s > 9.0 * STEP_S


@pytest.mark.parametrize(
    ("policy", "sends_ahead"), [("flotilla", True), ("smartspec", True), ("adaserve", False)]
)
def test_only_steps_of_policies_that_rest_are_expected_to_be_sent_ahead(
    policy: str, sends_ahead: bool
) -> None:
    """What plain steps save by it must not keep a policy from drafting for which nothing is sent ahead."""
    config = FlotillaConfig.model_validate({"target": {"path": "unused"}, "policy": {"name": policy}})
    planner = SchedulerCore(config, make_policy(config.policy), CostModel(DEFAULT_PROFILE)).planner
    beside = StepOverhead(DEFAULT_PROFILE.overhead_s, sends_ahead=sends_ahead)
    assert planner.context(4).plain_overhead_s == beside.plain_s(4)
    assert planner.context(4).sends_ahead is sends_ahead


class VerifiesNothing(Fixed):
    """Drafts, and takes none of it."""

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        return [np.zeros(1, dtype=np.int32) for _ in trees]


def test_drafts_that_are_never_verified_are_doubted_to_be_so_bad() -> None:
    world = World(1, "fixed", num_slots=2000)
    world.lose("poor")
    planner = world.core.planner
    planner.policy = VerifiesNothing(world.config.policy)
    learnt = planner.calibration.of("good")
    learnt.observe(np.full(1000, 0.9), np.zeros(1000, dtype=np.bool_))
    for number in range(4):
        world.send(submit(number, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=60)))
    world.drain()
    assert planner.totals.drafted_tokens > 100
    assert planner.totals.verified_tokens == 0
    assert learnt.tried.sum() <= 500
