"""All candidate trees of a step as one set of arrays, so that selection is vectorised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.tree import TokenTree
from engine.tree_batch import TreeBatch

# So few nodes are multiplied one by one in less time than layer by layer.
FEW_NODES = 192


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Trees of a batch, concatenated.

    Attributes:
        offsets: int64 [requests + 1], where each tree's nodes begin; its root is the first of them.
        request: int64 [nodes], index of the request a node belongs to.
        parent: int64 [nodes], index of the parent within the forest; -1 for roots.
        depth: int32 [nodes], 0 for roots.
        conditional: float64 [nodes], draft probability of a node given its parent; 1 for roots.
    """

    offsets: NDArray[np.int64]
    request: NDArray[np.int64]
    parent: NDArray[np.int64]
    depth: NDArray[np.int32]
    conditional: NDArray[np.float64]

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Forest:
        """Concatenate trees in order; of a batch what was concatenated before is used."""
        batch = TreeBatch.of(trees)
        roots = batch.offsets[:-1]
        parent = batch.above.copy()
        parent[roots] = -1
        conditional = np.exp(batch.step_logp)
        np.minimum(conditional, 1.0, out=conditional)
        return cls(batch.offsets, batch.tree_of, parent, batch.depth, conditional)

    @property
    def num_requests(self) -> int:
        """Trees in the forest."""
        return len(self.offsets) - 1

    @property
    def num_nodes(self) -> int:
        """Nodes in the forest, roots included."""
        return len(self.parent)

    @property
    def roots(self) -> NDArray[np.int64]:
        """int64 [requests], index of each tree's root."""
        return self.offsets[:-1]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 [requests], nodes of each tree, its root included."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def depths(self) -> NDArray[np.int32]:
        """int32 [requests], depth of each tree."""
        return np.maximum.reduceat(self.depth, self.roots)

    def path_product(self, conditional: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [nodes]: product of `conditional` from the root down to each node (the papers' f(v))."""
        if len(conditional) <= FEW_NODES:
            values = conditional.tolist()
            for node, parent in enumerate(self.parent.tolist()):
                if parent >= 0:  # else a root; parents come before their children
                    values[node] *= values[parent]
            return np.array(values)
        product = conditional.copy()
        by_depth = self.depth.argsort(kind="stable")
        parents = self.parent[by_depth]
        ends = np.bincount(self.depth).cumsum().tolist()
        for start, end in pairwise(ends):
            layer = by_depth[start:end]
            product[layer] *= product[parents[start:end]]
        return product

    def chosen_nodes(self, chosen: NDArray[np.bool_]) -> list[NDArray[np.int32]]:
        """Per request, the indices within its own tree of the nodes chosen, ascending."""
        picked = chosen.nonzero()[0]
        request = self.request[picked]
        nodes = (picked - self.offsets[request]).astype(np.int32)
        ends = np.bincount(request, minlength=self.num_requests).cumsum().tolist()
        # Views of one array, and plain numbers as bounds: there may be hundreds of requests.
        return [nodes[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
