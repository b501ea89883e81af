"""AdaServe's selection against its Algorithm 2, node by node."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import selection
from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.registry import make_policy
from engine.tree import TokenTree
from tests.cluster.both_ways import both_ways
from tests.cluster.policies.batches import candidate_trees, context, contexts, request, requests
from tests.cluster.test_selection import in_turn
from tests.examples import examples

few_nodes = both_ways(selection, "FEW_NODES", selection.FEW_NODES)


@pytest.mark.parametrize("name", ["adaserve", "adaserve-v1"])
@examples(100)
@given(
    st.lists(st.tuples(requests(), candidate_trees()), min_size=1, max_size=4),
    contexts(),
    st.integers(1, 8),
    st.integers(1, 24),
)
def test_the_nodes_are_those_of_algorithm_2(
    name: str, step: list[tuple[DecodeRequest, TokenTree]], context: StepContext, max_nodes: int, budget: int
) -> None:
    batch, trees = [one for one, _ in step], [tree for _, tree in step]
    policy = make_policy(PolicyConfig(name=name, verify_budget=budget, max_nodes=max_nodes))
    found = policy.select(batch, trees, context)
    forest = Forest.of(trees)
    f = forest.path_product(forest.conditional)
    need = np.array([one.required(context.step_s) for one in batch])
    depths = np.array([max(tree.depth.tolist()) for tree in trees])
    chosen = in_turn(forest, f, np.minimum(need, depths + 1.0), max_nodes, budget, need)
    rest = sorted(np.flatnonzero(~chosen).tolist(), key=lambda node: (-f[node], node))
    chosen[rest[: max(0, budget - int(chosen.sum()))]] = True
    assert [nodes.tolist() for nodes in found] == [nodes.tolist() for nodes in forest.chosen_nodes(chosen)]


def test_of_two_beyond_help_the_later_is_served_first() -> None:
    """Its tree is the shallower one, so by A_cap(r) it would come last."""
    late = request("late", decoding_s=5.0, tpot_s=0.05, num_decoded=20)
    less_late = request("less late", decoding_s=1.0, tpot_s=0.05, num_decoded=12)
    policy = make_policy(PolicyConfig(name="adaserve", verify_budget=3))
    trees = [TokenTree.chain(1, [2, 3, 4], [-0.1, -0.1, -0.1]), TokenTree.chain(1, [2], [-2.0])]
    assert [len(nodes) for nodes in policy.select([less_late, late], trees, context())] == [1, 2]
