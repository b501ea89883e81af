"""Which answers of a drafter are trees, node by node and at once, against `TokenTree.validate`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import draft_checks
from cluster.draft_checks import _are_trees
from engine.tree import TokenTree
from engine.tree_batch import TreeBatch
from tests.cluster.both_ways import both_ways
from tests.cluster.policies.batches import candidate_trees
from tests.examples import examples

few_nodes = both_ways(draft_checks, "FEW_NODES", draft_checks.FEW_NODES)

VOCAB_SIZE = 16
# What a field may be replaced by, each of which spoils some trees and not others.
WRONG: dict[str, list[float]] = {
    "token": [-1, 0, VOCAB_SIZE - 1, VOCAB_SIZE, 1 << 30],
    "parent": [-2, -1, 0, 1, 7, 100],
    "depth": [-1, 0, 1, 2, 100],
    "logp": [0.0, 1.0, float("nan"), float("inf"), float("-inf")],
}


@st.composite
def answers(draw: st.DrawFn) -> TokenTree:
    """A tree, of which one number may be another, or one field one number shorter."""
    tree = draw(candidate_trees())
    fields = {name: np.array(getattr(tree, name)) for name in WRONG}
    name = draw(st.sampled_from(sorted(WRONG)))
    kind = draw(st.sampled_from(["sound", "sound", "wrong", "short"]))
    if kind == "wrong":
        fields[name][draw(st.integers(0, len(tree) - 1))] = draw(st.sampled_from(WRONG[name]))
    elif kind == "short":
        fields[name] = fields[name][:-1]
    return TokenTree(**fields)


def is_sound(tree: TokenTree) -> bool:
    try:
        tree.validate()
    except ValueError:
        return False
    steps = [
        logp - (tree.logp[parent] if parent >= 0 else logp)
        for logp, parent in zip(tree.logp.tolist(), tree.parent.tolist(), strict=True)
    ]
    return not np.isnan(steps).any() and all(0 <= token < VOCAB_SIZE for token in tree.token.tolist())


@examples(200)
@given(st.lists(answers(), min_size=1, max_size=4))
def test_a_batch_is_taken_if_all_of_it_are_trees_of_the_vocabulary(batch: list[TokenTree]) -> None:
    with np.errstate(invalid="ignore"):
        expected = all(is_sound(tree) for tree in batch)
    assert _are_trees(TreeBatch(batch), VOCAB_SIZE) == expected


@pytest.mark.parametrize("logp", [float("nan"), float("inf"), float("-inf")])
def test_a_root_has_a_probability(logp: float) -> None:
    tree = TokenTree.of([3], [-1], [logp], [0])
    assert not _are_trees(TreeBatch([tree]), VOCAB_SIZE)
    assert _are_trees(TreeBatch([TokenTree.root_only(3)] * 100), VOCAB_SIZE)
