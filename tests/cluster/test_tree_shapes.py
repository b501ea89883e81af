"""Widths and depths of a batch's trees, at once, against counting each tree's layers."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine import tree_batch
from engine.tree import TokenTree
from engine.tree_batch import TreeBatch, tree_shapes, widest
from tests.cluster.both_ways import both_ways

few_nodes = both_ways(tree_batch, "FEW_NODES", tree_batch.FEW_NODES)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Of up to twelve nodes, parents anywhere before."""
    parents = [-1, *(draw(st.integers(0, node)) for node in range(draw(st.integers(0, 11))))]
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return TokenTree(
        token=np.zeros(len(parents), dtype=np.int32),
        parent=np.array(parents, dtype=np.int32),
        logp=np.zeros(len(parents), dtype=np.float32),
        depth=np.array(depth, dtype=np.int32),
    )


@given(st.lists(trees(), min_size=1, max_size=6))
def test_shapes_are_those_of_each_tree_by_itself(batch: list[TokenTree]) -> None:
    layers = [Counter(tree.depth.tolist()) for tree in batch]
    widths, depths = tree_shapes(batch)
    assert widths.tolist() == [max(sizes.values()) for sizes in layers]
    assert depths.tolist() == [max(sizes) for sizes in layers]
    deepest = max(depths.tolist())
    assert TreeBatch(batch).deepest == deepest
    assert widest(batch) == (max(widths.tolist()), deepest)
