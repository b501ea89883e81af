"""The default policy on a machine with a roofline: tokens are free up to the knee, and dear past it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cluster.config import PolicyConfig
from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.policies.flotilla import Flotilla
from cluster.policies.probing import PROBE_RUN
from engine.tree import TokenTree
from tests.cluster.policies.batches import context, request

KNEE = 24
TREE = TokenTree.chain(1, list(range(2, 9)), [-0.3 * i for i in range(1, 8)])
ROOFLINE = CostProfile(
    target=LinearCost(delta=1e-2, gamma_knee=2e-2, knee_tokens=KNEE),
    drafters={"small": LinearCost(delta=1e-5)},
)


def test_it_verifies_up_to_the_knee_and_not_beyond() -> None:
    policy = Flotilla(PolicyConfig(max_depth=6, verify_budget=1))
    roofline = dataclasses.replace(context(), cost=CostModel(ROOFLINE))
    for num_requests in (1, 2, 6):
        batch = [request(str(i)) for i in range(num_requests)]
        assert all(plan.depth > 0 for plan in policy.plan(batch, roofline))
        nodes = policy.select(batch, [TREE] * num_requests, roofline)
        assert sum(map(len, nodes)) == min(KNEE, num_requests * len(TREE))
        assert all(np.array_equal(one, np.arange(len(one))) for one in nodes)


def test_beside_prompts_that_reach_the_knee_no_draft_is_free() -> None:
    policy = Flotilla(PolicyConfig(max_depth=6))
    roofline = dataclasses.replace(context(), cost=CostModel(ROOFLINE))
    batch = [request(str(i)) for i in range(2)]
    for prompt_rows, most in ((0, 16), (KNEE - 6, 6), (KNEE, 2)):
        beside = dataclasses.replace(roofline, prompt_rows=prompt_rows)
        nodes = policy.select(batch, [TREE] * 2, beside)
        assert sum(map(len, nodes)) == most, prompt_rows
    assert any(plan.depth for plan in policy.plan(batch, roofline))
    full = dataclasses.replace(roofline, prompt_rows=KNEE)
    policy.plan(batch, full)  # the first one is a try
    assert not any(plan.depth for plan in policy.plan(batch, dataclasses.replace(full, step=1 + PROBE_RUN)))


def test_experts_that_prompts_need_are_read_for_drafts_too() -> None:
    """Alone, a request's first drafts cost a third of the forward each; beside a prompt they are free."""
    mixture = LinearCost(delta=1e-3, experts_s=2e-2, expert_share=1 / 16)
    cost = CostModel(CostProfile(target=mixture, drafters={"small": LinearCost(delta=4e-4)}))
    alone = dataclasses.replace(context(overhead_s=0.0, draft_s=0.0), cost=cost)
    beside = dataclasses.replace(alone, prompt_rows=128)
    batch = [request(rate=0.3)]
    [few], [many] = (Flotilla(PolicyConfig()).select(batch, [TREE], step) for step in (alone, beside))
    assert len(few) < len(many) == len(TREE)
    for step, drafts in ((alone, False), (beside, True)):
        policy = Flotilla(PolicyConfig())
        policy.plan(batch, step)  # the first one may be a try
        assert (policy.plan(batch, dataclasses.replace(step, step=1 + PROBE_RUN))[0].depth > 0) == drafts


def test_a_draft_of_a_mixture_ends_by_what_its_last_tokens_cost() -> None:
    """Its first ones read most of the experts that it needs: by the mean, drafts would end too soon."""
    n = 4
    mixture = LinearCost(delta=1e-3, experts_s=4e-2, expert_share=1 / 8)
    cost = CostModel(CostProfile(target=mixture, drafters={"small": LinearCost(delta=1e-6)}))
    step = dataclasses.replace(context(overhead_s=0.0, draft_s=0.0), cost=cost)
    batch = [request(str(i), rate=0.9) for i in range(n)]
    plans = Flotilla(PolicyConfig(max_depth=8)).plan(batch, step)
    added = cost.verify_added_seconds(n, n * max(plan.depth for plan in plans))
    goodput = n * 0.9**0 * (1 - 0.9**9) / 0.1 / cost.verify_seconds(n, 9 * n, 0, drafted=True)
    assert plans[0].stop_logp == pytest.approx(np.log(goodput * added[-1]), abs=0.3)
    assert plans[0].stop_logp < np.log(goodput * added.mean()) - 0.5
