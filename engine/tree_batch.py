"""The trees of a batch as one set of arrays, concatenated once for all that is done with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.tree import Float32, Int32, TokenTree

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Number = TypeVar("Number", bound=np.generic)

# So few trees are cut one by one in less time than all at once.
FEW_TREES = 8
# So few nodes are looked at one by one in less time than all at once.
FEW_NODES = 48


class TreeBatch(list[TokenTree]):
    """Trees in order; what is worked out of all of them is kept, so the list must not change after that.

    Attributes:
        num_nodes: nodes of all trees.
        sizes: int64 [trees], nodes of each tree.
        offsets: int64 [trees + 1], where each tree's nodes begin; its root is the first of them.
        tree_of: int64 [nodes], index of the tree a node belongs to.
        token, parent, logp, depth: [nodes], as in the trees.
        above: int64 [nodes], index of the parent within the batch; a root's is its own.
        step_logp: float64 [nodes], log-probability of a node given its parent; 0 at roots.
    """

    __slots__ = (
        "_above",
        "_depth",
        "_logp",
        "_num_nodes",
        "_offsets",
        "_parent",
        "_sizes",
        "_step_logp",
        "_token",
        "_tree_of",
    )

    def __init__(self, trees: Iterable[TokenTree] = ()) -> None:
        super().__init__(trees)
        self._num_nodes: int | None = None
        self._sizes: Int64 | None = None
        self._offsets: Int64 | None = None
        self._tree_of: Int64 | None = None
        self._token: Int32 | None = None
        self._parent: Int32 | None = None
        self._logp: Float32 | None = None
        self._depth: Int32 | None = None
        self._above: Int64 | None = None
        self._step_logp: Float64 | None = None

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> TreeBatch:
        """These trees; themselves if they are a batch already."""
        return trees if isinstance(trees, TreeBatch) else cls(trees)

    @property
    def num_nodes(self) -> int:
        """See above."""
        if self._num_nodes is None:
            self._num_nodes = sum([len(tree.token) for tree in self])
        return self._num_nodes

    @property
    def sizes(self) -> Int64:
        """See above."""
        if self._sizes is None:
            self._sizes = np.array([len(tree.token) for tree in self], dtype=np.int64)
        return self._sizes

    @property
    def offsets(self) -> Int64:
        """See above."""
        if self._offsets is None:
            self._offsets = np.zeros(len(self) + 1, dtype=np.int64)
            self.sizes.cumsum(out=self._offsets[1:])
        return self._offsets

    @property
    def tree_of(self) -> Int64:
        """See above."""
        if self._tree_of is None:
            self._tree_of = np.arange(len(self)).repeat(self.sizes)
        return self._tree_of

    @property
    def token(self) -> Int32:
        """See above."""
        if self._token is None:
            self._token = _joined([tree.token for tree in self])
        return self._token

    @property
    def parent(self) -> Int32:
        """See above."""
        if self._parent is None:
            self._parent = _joined([tree.parent for tree in self])
        return self._parent

    @property
    def logp(self) -> Float32:
        """See above."""
        if self._logp is None:
            self._logp = _joined([tree.logp for tree in self])
        return self._logp

    @property
    def depth(self) -> Int32:
        """See above."""
        if self._depth is None:
            self._depth = _joined([tree.depth for tree in self])
        return self._depth

    @property
    def above(self) -> Int64:
        """See above."""
        if self._above is None:
            roots = self.offsets[:-1]
            above = self.parent + roots.repeat(self.sizes)
            above[roots] = roots
            self._above = above
        return self._above

    @property
    def step_logp(self) -> Float64:
        """See above; infinite log-probabilities may make it no number."""
        if self._step_logp is None:
            logp = self.logp.astype(np.float64)
            with np.errstate(invalid="ignore"):
                self._step_logp = logp - logp[self.above]
        return self._step_logp

    @property
    def deepest(self) -> int:
        """Depth of the deepest tree."""
        if self.num_nodes <= FEW_NODES:
            return int(max([max(tree.depth.tolist()) for tree in self]))
        return int(np.maximum.reduce(self.depth))

    @property
    def depths(self) -> Int32:
        """int32 [trees], depth of each tree."""
        return np.maximum.reduceat(self.depth, self.offsets[:-1])


def _joined(arrays: list[NDArray[Number]]) -> NDArray[Number]:
    """One after the other; of a single tree, as with one request, its own."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def tree_shapes(trees: Sequence[TokenTree]) -> tuple[Int64, Int64]:
    """int64 [trees], nodes of each tree's widest layer; int64 [trees], its depth."""
    batch = TreeBatch.of(trees)
    depth = batch.depth
    num_layers = int(depth.max()) + 1
    counts = np.bincount(batch.tree_of * num_layers + depth, minlength=len(batch) * num_layers)
    counts = counts.reshape(len(batch), num_layers)
    # A tree has nodes in every layer down to its deepest.
    return counts.max(axis=1), np.count_nonzero(counts, axis=1) - 1


def widest(trees: Sequence[TokenTree]) -> tuple[int, int]:
    """Nodes of the widest layer of any of the trees, and the depth of the deepest."""
    batch = TreeBatch.of(trees)
    if batch.num_nodes <= FEW_NODES:
        of_trees = [tree.depth.tolist() for tree in batch]
        return max([max(map(depths.count, set(depths))) for depths in of_trees]), max(map(max, of_trees))
    depth, deepest = batch.depth, batch.deepest
    counts = np.bincount(batch.tree_of * (deepest + 1) + depth)
    return int(np.maximum.reduce(counts)), deepest


def subsets(trees: Sequence[TokenTree], nodes: Sequence[Int32]) -> list[TokenTree]:
    """`tree.subset` for every tree of a batch at once.

    Raises:
        ValueError: as `TokenTree.subset`, for any of them.
    """
    num_chosen = list(map(len, nodes))
    cut = [
        index
        for index, (tree, count) in enumerate(zip(trees, num_chosen, strict=True))
        if count < len(tree.token)
    ]
    result = list(trees)
    if len(cut) < FEW_TREES:
        for index in cut:
            result[index] = trees[index].subset(nodes[index])
        return result
    # All trees are cut at once, also those of which everything is kept: their arrays are there already.
    batch = TreeBatch.of(trees)
    counts = np.array(num_chosen)
    ends = counts.cumsum()
    starts = ends - counts
    chosen = np.concatenate(nodes)
    place = chosen + batch.offsets[:-1].repeat(counts)  # within all of these trees
    new_index = np.full(len(batch.token), -1, dtype=np.int32)
    new_index[place] = np.arange(len(place), dtype=np.int32) - starts.repeat(counts)
    parent = new_index[batch.above[place]]
    are_rooted = bool(counts.all()) and not chosen[starts].any()
    if are_rooted:
        parent[starts] = -1
    if not are_rooted or np.count_nonzero(parent < 0) != len(trees):
        raise ValueError("a draft tree contains the root and the parent of every node it contains")
    token, logp, depth = batch.token[place], batch.logp[place], batch.depth[place]
    begins, stops = starts.tolist(), ends.tolist()
    for index in cut:
        mine = slice(begins[index], stops[index])
        result[index] = TokenTree(token[mine], parent[mine], logp[mine], depth[mine])
    return result
