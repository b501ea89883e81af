"""The walk against a search over every path of the tree."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.tree import TokenTree
from verifier.tree_walk import walk


@st.composite
def trees(draw: st.DrawFn) -> tuple[TokenTree, list[int]]:
    """A random tree over three tokens, so that siblings repeat, and a decision per node."""
    size = draw(st.integers(1, 14))
    parent = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
    depth = [0] * size
    for i in range(1, size):
        depth[i] = depth[parent[i]] + 1
    token = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    decided = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    tree = TokenTree(
        token=np.array(token, np.int32),
        parent=np.array(parent, np.int32),
        logp=np.zeros(size, np.float32),
        depth=np.array(depth, np.int32),
    )
    return tree, decided


@given(trees())
def test_against_all_paths(case: tuple[TokenTree, list[int]]) -> None:
    tree, decided = case

    def is_accepted(node: int) -> bool:
        """Every step down to `node` is what was decided, by the first sibling that says so."""
        path = tree.path(node)
        for above, below in itertools.pairwise(path):
            right = [c for c in tree.children(above) if tree.token[c] == decided[above]]
            if not right or right[0] != below:
                return False
        return True

    deepest = max((n for n in range(len(tree)) if is_accepted(n)), key=lambda n: tree.depth[n])
    accepted, bonus = walk(tree, decided)
    assert [0, *accepted] == tree.path(deepest)
    assert bonus == decided[deepest]


def test_first_of_equal_siblings() -> None:
    tree = TokenTree(
        token=np.array([9, 5, 5, 6], np.int32),
        parent=np.array([-1, 0, 0, 2], np.int32),
        logp=np.zeros(4, np.float32),
        depth=np.array([0, 1, 1, 2], np.int32),
    )
    assert walk(tree, [5, 6, 6, 1]) == ([1], 6)
