"""What every policy promises: plans within limits, selections that are draft trees, and no chance in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PolicyConfig
from cluster.policies.base import Policy
from cluster.policies.registry import POLICIES, make_policy
from tests.cluster.policies.batches import candidate_trees, context, contexts, request, requests
from tests.examples import examples

CONFIGS = [PolicyConfig(name=name) for name in sorted(POLICIES)] + [
    PolicyConfig(name="smartspec", smartspec_acceptance="request"),
    PolicyConfig(name="smartspec", smartspec_acceptance="confidence"),
    PolicyConfig(name="smartspec", smartspec_ahead=True),
    PolicyConfig(name="adaserve-v1", verify_budget=3, max_depth=0),
    PolicyConfig(name="equal-greedy", verify_budget=7),
    PolicyConfig(name="global-greedy", verify_budget=7),
    PolicyConfig(name="specinfer", expansion=(2, 3)),
]


def made(config: PolicyConfig) -> Policy:
    return make_policy(config)


def label(config: PolicyConfig) -> str:
    return "-".join([config.name, *(str(v) for v in config.model_dump(exclude_defaults=True).values())][:3])


@pytest.mark.parametrize("config", CONFIGS, ids=label)
@examples(40)
@given(data=st.data())
def test_plans_keep_limits_and_selections_are_draft_trees(config: PolicyConfig, data: st.DataObject) -> None:
    batch = data.draw(st.lists(requests(), max_size=4))
    trees = [data.draw(candidate_trees()) for _ in batch]
    step = data.draw(contexts())
    policy, other = made(config), made(config)
    plans = policy.plan(batch, step)
    assert len(plans) == len(batch)
    for view, plan in zip(batch, plans, strict=True):
        assert 0 <= plan.depth <= view.max_draft
        assert 1 <= plan.width <= view.max_width
    selected = policy.select(batch, trees, step)
    assert len(selected) == len(batch)
    for tree, nodes in zip(trees, selected, strict=True):
        assert nodes.dtype == np.int32
        assert nodes[0] == 0
        assert (np.diff(nodes) > 0).all()
        tree.subset(nodes).validate()
    assert other.plan(batch, step) == plans
    for first, second in zip(selected, other.select(batch, trees, step), strict=True):
        np.testing.assert_array_equal(first, second)


@examples(60)
@given(st.data())
def test_budgets_are_kept_and_shares_are_equal(data: st.DataObject) -> None:
    batch = data.draw(st.lists(requests(), min_size=1, max_size=4))
    trees = [data.draw(candidate_trees()) for _ in batch]
    budget = data.draw(st.integers(1, 20))
    sizes = {}
    for name in ("equal-greedy", "global-greedy", "adaserve-v1"):
        selected = made(PolicyConfig(name=name, verify_budget=budget)).select(batch, trees, context())
        sizes[name] = [len(nodes) for nodes in selected]
        assert sum(sizes[name]) <= max(budget, len(batch))
    assert sum(sizes["global-greedy"]) == min(max(budget, len(batch)), sum(len(tree) for tree in trees))
    share, rest = divmod(budget, len(batch))
    for index, (size, tree) in enumerate(zip(sizes["equal-greedy"], trees, strict=True)):
        assert size == min(len(tree), max(1, share + (index < rest)))


def test_the_first_versions_shape_follows_the_budget_per_request() -> None:
    policy = made(PolicyConfig(name="adaserve-v1", verify_budget=10, max_depth=6, max_width=3))
    shapes = {n: policy.plan([request()] * n, context())[0] for n in (1, 4, 6, 20)}
    assert [(plan.depth, plan.width) for plan in shapes.values()] == [(6, 3), (3, 2), (2, 1), (1, 1)]
