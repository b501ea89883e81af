"""Token trees as flat arrays (design, contract "Token tree"; SpecInfer's token tree)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

#: Nodes up to which a pass over them takes less than numpy's few operations.
_SMALL = 24

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


class TokenTree(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tree of tokens in topological order; node 0 is the root, the last committed token.

    Attributes:
        token: int32 [nodes], vocabulary ids.
        parent: int32 [nodes], index of the parent within the tree; -1 for the root only, and
            `parent[i] < i` for every other node.
        logp: float32 [nodes], sum of log-probabilities from the root under the drafter; 0 at the root.
        depth: int32 [nodes], distance from the root; 0 at the root.
    """

    token: Int32
    parent: Int32
    logp: Float32
    depth: Int32

    @classmethod
    def root_only(cls, token: int) -> TokenTree:
        """The tree that proposes nothing: plain decoding of one token."""
        return cls(
            token=np.array([token], dtype=np.int32), parent=_ROOT_PARENT, logp=_ROOT_LOGP, depth=_ROOT_DEPTH
        )

    @classmethod
    def of(
        cls, token: Sequence[int], parent: Sequence[int], logp: Sequence[float], depth: Sequence[int]
    ) -> TokenTree:
        """The tree of these nodes, as documented above; `validate` says whether it is one."""
        return cls(
            token=np.array(token, dtype=np.int32),
            parent=np.array(parent, dtype=np.int32),
            logp=np.array(logp, dtype=np.float32),
            depth=np.array(depth, dtype=np.int32),
        )

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int], logps: Sequence[float]) -> TokenTree:
        """A tree of width one: `tokens` after `root`; `logps` are the steps' own log-probabilities."""
        if len(tokens) != len(logps):
            raise ValueError(f"{len(tokens)} tokens but {len(logps)} log-probabilities")
        num_nodes = len(tokens) + 1
        return cls(
            token=np.array([root, *tokens], dtype=np.int32),
            parent=np.arange(-1, num_nodes - 1, dtype=np.int32),
            logp=np.concatenate([[0.0], np.cumsum(logps)]).astype(np.float32),
            depth=np.arange(num_nodes, dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.token)

    @property
    def num_drafted(self) -> int:
        """Nodes besides the root."""
        return len(self.token) - 1

    def validate(self) -> None:
        """Raise ValueError unless this is a tree as documented above."""
        n = len(self.token)
        if n == 0:
            raise ValueError("a token tree has at least its root")
        if not (len(self.parent) == len(self.logp) == len(self.depth) == n):
            raise ValueError("token, parent, logp and depth differ in length")
        if self.parent[0] != -1 or self.depth[0] != 0:
            raise ValueError("node 0 must be the root: parent -1, depth 0")
        if n <= _SMALL:
            parents, depths = self.parent.tolist(), self.depth.tolist()
            for node in range(1, n):
                if not 0 <= parents[node] < node:
                    raise ValueError("every node but the root needs a parent before it")
                if depths[node] != depths[parents[node]] + 1:
                    raise ValueError("a node is one deeper than its parent")
        else:
            parent = self.parent[1:]
            if (parent < 0).any() or (parent >= np.arange(1, n)).any():
                raise ValueError("every node but the root needs a parent before it")
            if (self.depth[1:] != self.depth[parent] + 1).any():
                raise ValueError("a node is one deeper than its parent")

    def subset(self, nodes: Int32) -> TokenTree:
        """The draft tree of `nodes` (ascending, containing 0, closed under parent).

        Raises:
            ValueError: if a chosen node's parent was not chosen, or the root is missing.
        """
        if len(nodes) == len(self.token):
            return self
        if len(nodes) == 1 and nodes[0] == 0:
            return TokenTree.root_only(int(self.token[0]))
        size = len(nodes)
        if size and nodes[-1] == size - 1:
            # The first nodes in order, as in every cut chain: closed under parent already.
            return TokenTree(
                token=self.token[:size],
                parent=self.parent[:size],
                logp=self.logp[:size],
                depth=self.depth[:size],
            )
        new_index = np.full(len(self.token), -1, dtype=np.int32)
        new_index[nodes] = np.arange(len(nodes), dtype=np.int32)
        parent = self.parent[nodes]
        new_parent = np.where(parent < 0, -1, new_index[parent]).astype(np.int32)
        if len(nodes) == 0 or nodes[0] != 0 or (new_parent[1:] < 0).any():
            raise ValueError("a draft tree contains the root and the parent of every node it contains")
        return TokenTree(
            token=self.token[nodes], parent=new_parent, logp=self.logp[nodes], depth=self.depth[nodes]
        )

    def path(self, node: int) -> list[int]:
        """Node indices from the root (included) down to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def children(self, node: int) -> Int32:
        """Indices of the children of `node`, ascending."""
        return np.flatnonzero(self.parent == node).astype(np.int32)

    def ancestor_mask(self) -> Bool:
        """bool [nodes, nodes]: row i is true at i and at every ancestor of i."""
        return ancestor_mask(self.parent)


# Shared by all trees that are only a root, which most are while speculation is off; never written to.
_ROOT_PARENT = np.array([-1], dtype=np.int32)
_ROOT_LOGP = np.zeros(1, dtype=np.float32)
_ROOT_DEPTH = np.zeros(1, dtype=np.int32)
for _array in (_ROOT_PARENT, _ROOT_LOGP, _ROOT_DEPTH):
    _array.flags.writeable = False


def ancestor_mask(parent: Int32) -> Bool:
    """bool [n, n] visibility of a topologically ordered forest: each row sees itself and its ancestors."""
    n = len(parent)
    mask = np.eye(n, dtype=np.bool_)
    for node in range(n):
        above = parent[node]
        if above >= 0:
            mask[node] |= mask[above]
    return mask
