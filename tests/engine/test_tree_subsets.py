"""Cutting all trees of a batch at once, against cutting each by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tree import Int32, TokenTree
from engine.tree_batch import FEW_TREES, subsets


@st.composite
def cuts(draw: st.DrawFn) -> tuple[TokenTree, Int32]:
    """A tree of up to nine nodes, and nodes of it closed under parent."""
    parents = [-1, *(draw(st.integers(0, node)) for node in range(draw(st.integers(0, 8))))]
    depth: list[int] = []
    kept: list[int] = []
    for node, parent in enumerate(parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        if parent < 0 or (parent in kept and draw(st.booleans())):
            kept.append(node)
    n = len(parents)
    tree = TokenTree(
        token=np.arange(n, dtype=np.int32) + draw(st.integers(0, 100)),
        parent=np.array(parents, dtype=np.int32),
        logp=-np.arange(n, dtype=np.float32),
        depth=np.array(depth, dtype=np.int32),
    )
    return tree, np.array(kept, dtype=np.int32)


@given(st.lists(cuts(), max_size=2 * FEW_TREES))
def test_all_at_once_are_those_of_each_by_itself(batch: list[tuple[TokenTree, Int32]]) -> None:
    trees, nodes = [tree for tree, _ in batch], [kept for _, kept in batch]
    for got, tree, kept in zip(subsets(trees, nodes), trees, nodes, strict=True):
        got.validate()
        expected = tree.subset(kept)
        for name in ("token", "parent", "logp", "depth"):
            mine, its = getattr(got, name), getattr(expected, name)
            assert mine.dtype == its.dtype
            assert mine.tolist() == its.tolist()


@pytest.mark.parametrize("num_others", [0, FEW_TREES])
@pytest.mark.parametrize("nodes", [[], [1, 2], [0, 2], [1]])
def test_nodes_without_their_parents_are_refused(nodes: list[int], num_others: int) -> None:
    chain = TokenTree.chain(1, [2, 3, 4], [0.0] * 3)
    others = [(chain, np.array([0, 1], dtype=np.int32))] * num_others
    batch = [*others, (chain, np.array(nodes, dtype=np.int32)), *others]
    with pytest.raises(ValueError, match="contains the root and the parent"):
        subsets([tree for tree, _ in batch], [kept for _, kept in batch])
