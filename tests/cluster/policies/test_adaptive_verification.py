"""vLLM's adaptive verification against brute force over prefixes and over all draft lengths."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.policies.base import StepContext
from cluster.policies.registry import make_policy
from engine.tree import TokenTree
from tests.cluster.policies.batches import candidate_trees, context, contexts, request
from tests.examples import examples


@examples(150)
@given(st.lists(candidate_trees(4, chain=True), min_size=1, max_size=3), contexts())
def test_the_budget_is_the_enumerated_one(trees: list[TokenTree], step: StepContext) -> None:
    batch, n = [request()] * len(trees), len(trees)
    selected = make_policy(PolicyConfig(name="adaptive-verification")).select(batch, trees, step)
    forest = Forest.of(trees)
    survival = step.calibration.path_probabilities(forest, ["small"] * n)
    of_tree = [survival[start:end] for start, end in zip(forest.offsets, forest.offsets[1:], strict=False)]
    base_s = step.draft_s + step.draft_overhead_s
    num_context = sum(view.num_context for view in batch)

    def goodput(tokens: float, drafted: int) -> float:
        return tokens / (base_s + step.cost.verify_seconds(n, n + drafted, num_context, drafted=True))

    def of_lengths(lengths: tuple[int, ...]) -> float:
        kept = zip(of_tree, lengths, strict=True)
        return goodput(sum(float(chain[: k + 1].sum()) for chain, k in kept), sum(lengths))

    slots = sorted((float(s) for chain in of_tree for s in chain[1:]), reverse=True)
    prefixes = [goodput(n + sum(slots[:m]), m) for m in range(len(slots) + 1)]
    lengths = product(*(range(len(tree)) for tree in trees))
    found = of_lengths(tuple(len(nodes) - 1 for nodes in selected))
    assert found == pytest.approx(max(prefixes))
    assert found == pytest.approx(max(of_lengths(vector) for vector in lengths))


def test_the_shaky_chain_gives_way_and_slos_do_not_count() -> None:
    sure = TokenTree.chain(0, [1, 2, 3], np.log([0.97] * 3).tolist())
    shaky = TokenTree.chain(0, [1, 2, 3], np.log([0.05] * 3).tolist())
    policy = make_policy(PolicyConfig(name="adaptive-verification"))
    for tpot_s in (None, 1e-3):
        batch = [request("a"), request("b", tpot_s=tpot_s)]
        selected = policy.select(batch, [sure, shaky], context(token_s=2e-3))
        assert [len(nodes) for nodes in selected] == [4, 1]
