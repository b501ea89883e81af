"""SpecInfer's static tree and Transformers' confidence threshold."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.policies.registry import make_policy
from drafters.messages import DraftPlan
from engine.tree import TokenTree
from tests.cluster.policies.batches import candidate_trees, context, request
from tests.examples import examples


def beam(width: int, depth: int) -> TokenTree:
    """Each node of the last layer has `width` children as likely as their place says."""
    token, parent, logp, level = [0], [-1], [0.0], [0]
    last = [0]
    for layer in range(1, depth + 1):
        # Only the best node is expanded where that fills the layer; then each has one child.
        above = [last[0]] * width if layer <= 3 else last
        last = []
        for place, node in enumerate(above):
            last.append(len(token))
            token.append(len(token))
            parent.append(node)
            logp.append(logp[node] - 0.1 * (place + 1))
            level.append(layer)
    return TokenTree.of(token, parent, logp, level)


def test_specinfer_takes_its_static_shape_from_the_beam() -> None:
    policy = make_policy(PolicyConfig(name="specinfer"))
    (plan,) = policy.plan([request(max_draft=20)], context())
    assert (plan.depth, plan.width) == (8, 3)
    tree = beam(plan.width, plan.depth)
    (nodes,) = policy.select([request()], [tree], context())
    assert np.bincount(tree.depth[nodes]).tolist() == [1, 1, 1, 3, 3, 3, 3, 3, 3]


def test_specinfers_width_is_that_of_the_widest_layer() -> None:
    policy = make_policy(PolicyConfig(name="specinfer", expansion=(2, 2, 1)))
    (plan,) = policy.plan([request()], context())
    assert (plan.depth, plan.width) == (3, 4)


@examples(80)
@given(
    st.lists(candidate_trees(), min_size=1, max_size=3), st.lists(st.integers(1, 3), min_size=1, max_size=4)
)
def test_specinfer_takes_the_likeliest_children_of_each_node(
    trees: list[TokenTree], expansion: list[int]
) -> None:
    policy = make_policy(PolicyConfig(name="specinfer", expansion=tuple(expansion)))
    selected = policy.select([request()] * len(trees), trees, context())
    for tree, nodes in zip(trees, selected, strict=True):
        conditional = Forest.of([tree]).conditional
        wanted, layer = [0], [0]
        for most in expansion:
            children = [
                sorted(tree.children(node).tolist(), key=lambda child: (-conditional[child], child))[:most]
                for node in layer
            ]
            layer = [child for family in children for child in family]
            wanted += layer
        assert nodes.tolist() == sorted(wanted)


def test_threshold_is_transformers_rule() -> None:
    """Which token ends a draft is the drafter's business; all of it is verified, that token included."""
    for threshold, least in ((0.4, math.log(0.4)), (0.0, -math.inf), (1.0, 0.0)):
        policy = make_policy(PolicyConfig(name="threshold", confidence_threshold=threshold, max_depth=5))
        plans = policy.plan([request(max_draft=20), request(max_draft=2)], context())
        assert plans == [DraftPlan(depth=5, stop_token_logp=least), DraftPlan(depth=2, stop_token_logp=least)]
    tree = TokenTree.chain(0, [1, 2, 3], np.log([0.9, 0.8, 0.1]).tolist())
    assert [nodes.tolist() for nodes in policy.select([request()], [tree], context())] == [[0, 1, 2, 3]]
