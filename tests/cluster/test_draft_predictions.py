"""What a draft call is taken to have cost, when a stop rule ended it before its plans did."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.cost_model import CostModel, CostProfile
from cluster.drafter_pool import DrafterPool
from cluster.linear_cost import LinearCost
from drafters.messages import Draft, DraftItem, DraftPlan, DraftResult
from drafters.protocol import Capabilities
from engine.tree import TokenTree

COST = CostProfile(
    target=LinearCost(gamma=1e-4, delta=1e-2), drafters={"small": LinearCost(gamma=1e-4, delta=2e-3)}
)
CAPABILITIES = Capabilities(
    kind="model",
    max_depth=8,
    max_width=4,
    has_probabilities=True,
    needs_prefill=True,
    vocab_size=50,
    max_tokens=200,
)


@pytest.mark.parametrize("came_to", [0, 1, 4, 6])
def test_a_draft_that_ended_early_is_judged_by_the_layers_it_came_to(came_to: int) -> None:
    cost = CostModel(COST)
    pool = DrafterPool(cost, max_depth=6)
    pool.add("small", CAPABILITIES, max_requests=8)
    items = [
        DraftItem(request_id=name, start=9, tokens=np.array([1], np.int32), plan=DraftPlan(depth))
        for name, depth in (("a", 6), ("b", 2))
    ]
    call = pool.call("small", items, 0.0, cost.draft_seconds("small", 2, 1, 6))
    trees = {
        name: TokenTree.chain(1, [2] * depth, [-0.1] * depth)
        for name, depth in (("a", came_to), ("b", min(came_to, 2)))
    }
    drafts = [Draft(request_id=name, tree=tree) for name, tree in trees.items()]
    outstanding = pool.answered("small", DraftResult(call_id=call.call_id, drafts=drafts), 0.0)
    assert outstanding is not None
    assert outstanding.layers_s == pytest.approx(cost.layers_seconds("small", 2, 1, came_to))
