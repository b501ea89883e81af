"""The default policy on a machine with a roofline: tokens are free up to the knee, and dear past it."""

from __future__ import annotations

import dataclasses

import numpy as np

from cluster.config import PolicyConfig
from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.policies.flotilla import Flotilla
from engine.tree import TokenTree
from tests.cluster.policies.batches import context, request

KNEE = 24
ROOFLINE = CostProfile(
    target=LinearCost(delta=1e-2, gamma_knee=2e-2, knee_tokens=KNEE),
    drafters={"small": LinearCost(delta=1e-5)},
)


def test_it_verifies_up_to_the_knee_and_not_beyond() -> None:
    policy = Flotilla(PolicyConfig(max_depth=6, verify_budget=1))
    roofline = dataclasses.replace(context(), cost=CostModel(ROOFLINE))
    tree = TokenTree.chain(1, list(range(2, 9)), [-0.3 * i for i in range(1, 8)])
    for num_requests in (1, 2, 6):
        batch = [request(str(i)) for i in range(num_requests)]
        assert all(plan.depth > 0 for plan in policy.plan(batch, roofline))
        nodes = policy.select(batch, [tree] * num_requests, roofline)
        assert sum(map(len, nodes)) == min(KNEE, num_requests * len(tree))
        assert all(np.array_equal(one, np.arange(len(one))) for one in nodes)
