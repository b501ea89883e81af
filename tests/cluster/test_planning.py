"""What the step planner learns of whole iterations."""

from __future__ import annotations

from cluster.batching.iteration import Iteration
from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.policies.registry import make_policy
from verifier.messages import Verdict, VerifyResult

STEP_S = 0.012
ANSWER = VerifyResult(call_id=1, verdicts=[Verdict(request_id="r", tokens=[1])], forward_seconds=0.01)


def test_after_a_pause_of_the_machine_steps_are_soon_expected_to_take_what_they_take() -> None:
    """Else every request seems late for long: needs are by it, and best effort gives way by it."""
    config = FlotillaConfig.model_validate({"target": {"path": "unused"}})
    planner = SchedulerCore(config, make_policy(config.policy), CostModel(DEFAULT_PROFILE)).planner

    def iterate(seconds: float, times: int = 1) -> None:
        for _ in range(times):
            planner.measure_iteration(Iteration(seconds, 0.0, seconds), ANSWER, was_ahead=False)

    iterate(STEP_S, 100)
    iterate(60.0)
    assert planner.step_s < 2.0 * STEP_S
    iterate(STEP_S, 20)
    assert planner.step_s < 1.2 * STEP_S
    # Steps that stay longer are believed in as many.
    iterate(10.0 * STEP_S, 30)
    assert planner.step_s > 9.0 * STEP_S
