"""Policies with a depth of their own are drafted, served and admitted by it, and not by `max_depth`."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.events import Action, DrafterReady, Reject, RequestArrived, VerifierReady
from cluster.policies.registry import make_policy
from cluster.stream_messages import Objective, Submit
from engine.sampling_params import SamplingParams
from tests.cluster.test_drafter_pool import capabilities

ALONE_MS = 1e3 * DEFAULT_PROFILE.target.seconds(1, 1, 0)
OWN: list[tuple[dict[str, Any], int]] = [
    ({"name": "fixed", "fixed_depth": 6, "max_depth": 0, "min_depth": 0}, 6),
    ({"name": "fixed", "fixed_depth": 6, "max_depth": 2}, 6),
    ({"name": "fixed", "fixed_depth": 2, "max_depth": 8}, 2),
    ({"name": "specinfer", "expansion": [1, 1, 3, 1], "max_depth": 2}, 4),
    ({"name": "smartspec", "fixed_depth": 6, "max_depth": 3}, 3),
]


def arrived(policy: dict[str, Any], tpot_ms: float) -> tuple[SchedulerCore, list[Action]]:
    """A cell with one drafter, and what it says of a request with this objective."""
    config = FlotillaConfig.model_validate({"target": {"path": "unused"}, "policy": policy})
    core = SchedulerCore(config, make_policy(config.policy), CostModel(DEFAULT_PROFILE))
    core.handle(VerifierReady(400, 200, 50), 0.0)
    core.handle(DrafterReady("a", capabilities(), 6), 0.0)
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    objective = Objective(tpot_ms=tpot_ms)
    submit = Submit(request_id="r", prompt=[1, 2, 3], sampling=sampling, objective=objective)
    return core, core.handle(RequestArrived(submit, "a"), 0.1)


@pytest.mark.parametrize(("policy", "deepest"), OWN)
def test_an_objective_is_refused_if_no_draft_could_keep_it(policy: dict[str, Any], deepest: int) -> None:
    for share, refused in ((1.01, False), (0.99, True)):
        _, actions = arrived(policy, share * ALONE_MS / (deepest + 1))
        codes = [action.rejection.code for action in actions if isinstance(action, Reject)]
        assert codes == (["slo_infeasible"] if refused else [])


@pytest.mark.parametrize(("policy", "deepest"), OWN)
def test_whoever_is_drafted_for_has_a_drafter(policy: dict[str, Any], deepest: int) -> None:
    core, _ = arrived(policy, 1e4)
    assert core.pool.max_depth == deepest
    assert core.requests["r"].drafter == "a"
