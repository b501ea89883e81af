"""All candidate trees of a step as one set of arrays, so that selection is vectorised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.tree import TokenTree


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
        """Concatenate trees in order."""
        sizes = np.fromiter((len(tree.token) for tree in trees), dtype=np.int64, count=len(trees))
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        parent = np.concatenate([tree.parent for tree in trees]).astype(np.int64)
        is_root = parent < 0
        parent += np.repeat(offsets[:-1], sizes)
        parent[is_root] = -1
        logp = np.concatenate([tree.logp for tree in trees]).astype(np.float64)
        conditional = np.exp(logp - logp[parent])
        conditional[is_root] = 1.0
        np.minimum(conditional, 1.0, out=conditional)
        return cls(
            offsets=offsets,
            request=np.repeat(np.arange(len(trees)), sizes),
            parent=parent,
            depth=np.concatenate([tree.depth for tree in trees]),
            conditional=conditional,
        )

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
        return np.diff(self.offsets)

    @property
    def depths(self) -> NDArray[np.int32]:
        """int32 [requests], depth of each tree."""
        return np.maximum.reduceat(self.depth, self.roots)

    def path_product(self, conditional: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [nodes]: product of `conditional` from the root down to each node (the papers' f(v))."""
        product = conditional.copy()
        for depth in range(1, int(self.depth.max(initial=0)) + 1):
            layer = np.flatnonzero(self.depth == depth)
            product[layer] *= product[self.parent[layer]]
        return product

    def chosen_nodes(self, chosen: NDArray[np.bool_]) -> list[NDArray[np.int32]]:
        """Per request, the indices within its own tree of the nodes chosen, ascending."""
        picked = np.flatnonzero(chosen)
        request = self.request[picked]
        nodes = (picked - self.offsets[request]).astype(np.int32)
        ends = np.cumsum(np.bincount(request, minlength=self.num_requests)).tolist()
        # Views of one array, and plain numbers as bounds: there may be hundreds of requests.
        return [nodes[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def tree_shapes(trees: Sequence[TokenTree]) -> list[tuple[int, int]]:
    """Nodes of each tree's widest layer, and its depth."""
    sizes = [len(tree.token) for tree in trees]
    depth = np.concatenate([tree.depth for tree in trees])
    num_layers = int(depth.max()) + 1
    layer = np.repeat(np.arange(len(trees)) * num_layers, sizes) + depth
    counts = np.bincount(layer, minlength=len(trees) * num_layers).reshape(len(trees), num_layers)
    # A tree has nodes in every layer down to its deepest.
    depths = np.count_nonzero(counts, axis=1) - 1
    return list(zip(counts.max(axis=1).tolist(), depths.tolist(), strict=True))
