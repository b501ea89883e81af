"""Beam growth of one candidate tree (AdaServe, step 1 "Speculate"), free of models and KV caches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from drafters.messages import DraftPlan
from engine.tree import TokenTree

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]

NONE = -1


class Beam:
    """The candidate tree of one request while it grows, one layer per model forward.

    The *frontier* is the nodes whose children come next. Each round is: forward the frontier (the root is
    forwarded by the caller's catch-up), hand the model's best next tokens to `grow`, which keeps the
    `width` best paths as the new layer. A node that is a stop token stays a leaf.

    Attributes:
        token, parent, logp: int32, int32, float32 [capacity], as in `TokenTree`; `size` of them are set.
        size: nodes so far, root included.
        depth: layers so far.
        frontier: int32 [live], nodes to forward and expand next; empty once the tree is finished.
        first_choice: int32 [capacity], the drafter's most likely next token after each node expanded; -1
            where the node was never forwarded.
        slot: int32 [capacity], the KV slot of each node forwarded; -1 for the others and for the root,
            whose KV is part of the context.
    """

    __slots__ = (
        "_ancestors",
        "_frontier_logp",
        "_node_depth",
        "_num_forwarded",
        "_plan",
        "_stops",
        "depth",
        "first_choice",
        "frontier",
        "logp",
        "parent",
        "size",
        "slot",
        "token",
    )

    def __init__(self, root: int, plan: DraftPlan, stops: frozenset[int] = frozenset()) -> None:
        """A tree of the root alone; `stops` are the tokens after which generation ends."""
        capacity = 1 + plan.depth * plan.width
        self.token = np.full(capacity, root, dtype=np.int32)
        self.parent = np.full(capacity, NONE, dtype=np.int32)
        self.logp = np.zeros(capacity, dtype=np.float32)
        self.first_choice = np.full(capacity, NONE, dtype=np.int32)
        self.slot = np.full(capacity, NONE, dtype=np.int32)
        self._node_depth = np.zeros(capacity, dtype=np.int32)
        self.depth = 0
        self.size = 1
        self.frontier = np.zeros(1, dtype=np.int32)
        self._plan = plan
        self._stops = stops
        self._frontier_logp = np.zeros(1, dtype=np.float32)
        self._ancestors = np.zeros((1, 0), dtype=np.bool_)  # of frontier rows, among nodes forwarded
        self._num_forwarded = 0

    def grow(self, logp: Float32, token: Int32) -> None:
        """Add the next layer.

        Args:
            logp: float32 [live, k], log-probabilities of the best next tokens after each frontier node,
                descending in each row; k >= width unless the vocabulary is smaller.
            token: int32 [live, k], those tokens.
        """
        plan = self._plan
        self.first_choice[self.frontier] = token[:, 0]
        if self.depth >= plan.depth:
            self.stop()
            return
        choices = token.shape[1]
        if len(self.frontier) == 1:
            kept = np.arange(min(choices, plan.width))
            best = self._frontier_logp[0] + logp[0, : plan.width]
        else:
            total = (self._frontier_logp[:, None] + logp).ravel()
            kept = np.argsort(-total, kind="stable")[: plan.width]
            best = total[kept]
        if not np.isfinite(best[-1]):  # tokens ruled out (by min_tokens, top-p, a bias of -inf)
            kept = kept[np.isfinite(best)]
            best = best[: len(kept)]
            if not len(kept):
                self.stop()
                return
        row = kept // choices
        low, high = self.size, self.size + len(kept)
        tokens = token.ravel()[kept]
        self.token[low:high] = tokens
        self.parent[low:high] = self.frontier[row]
        self.logp[low:high] = best
        self.size = high
        self.depth += 1
        self._node_depth[low:high] = self.depth
        if self.depth >= plan.depth or best[0] < plan.stop_logp:
            self.stop()
            return
        self.frontier = np.arange(low, high, dtype=np.int32)
        self._frontier_logp = best
        if self._stops and not self._stops.isdisjoint(tokens.tolist()):
            goes_on = np.array([t not in self._stops for t in tokens.tolist()])
            self.frontier, row, self._frontier_logp = self.frontier[goes_on], row[goes_on], best[goes_on]
        if plan.width > 1:
            self._ancestors = self._ancestors[row]

    def stop(self) -> None:
        """Finish the tree as it stands."""
        self.frontier = self.frontier[:0]

    def forwarding(self, slots: Int32) -> tuple[Int32, Bool | None]:
        """Note that the frontier is forwarded into `slots` (int32 [live]) and say what its rows may see.

        Returns:
            int32 [forwarded before], the slots of all tree nodes forwarded in earlier layers, in order
            (they follow the context in `Segment.past`), and the `visible` of `Segment`: bool [live,
            forwarded before + live], or None for a chain, where causal is right.
        """
        self.slot[self.frontier] = slots
        before, live = self._num_forwarded, len(slots)
        self._num_forwarded += live
        earlier = self.slot[1 : self.frontier[0]]
        if self._plan.width == 1:
            return earlier, None
        visible = np.zeros((live, before + live), dtype=np.bool_)
        visible[:, :before] = self._ancestors
        visible.ravel()[before :: before + live + 1] = True  # the diagonal of the last `live` columns
        self._ancestors = visible
        return (earlier if len(earlier) == before else earlier[earlier >= 0]), visible

    def tree(self) -> TokenTree:
        """The candidate tree grown so far; at most `width` nodes per layer, best path first in each."""
        n = self.size
        return TokenTree(
            token=self.token[:n], parent=self.parent[:n], logp=self.logp[:n], depth=self._node_depth[:n]
        )

    @property
    def width(self) -> int:
        """Most nodes per layer."""
        return self._plan.width

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the first below the root down to `node`; none for the root."""
        tokens = []
        while node > 0:
            tokens.append(int(self.token[node]))
            node = int(self.parent[node])
        return tokens[::-1]

    def child(self, node: int, token: int) -> int:
        """The child of `node` that holds `token`, or -1."""
        hits = np.flatnonzero((self.parent[: self.size] == node) & (self.token[: self.size] == token))
        return int(hits[0]) if len(hits) else NONE
