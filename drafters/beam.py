"""Beam growth of one candidate tree (AdaServe, step 1 "Speculate"), free of models and KV caches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from drafters.messages import DraftPlan
from engine.tree import TokenTree

Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

NONE = -1


class Beam:
    """The candidate tree of one request while it grows, one layer per model forward.

    The *frontier* is the nodes whose children come next. Each round is: forward the frontier (the root is
    forwarded by the caller's catch-up), hand the model's best next tokens to `grow`, which keeps the
    `width` best paths as the new layer. A node that is a stop token, or that its model is not sure enough of
    (`DraftPlan.stop_token_logp`), stays a leaf.

    Lists and not arrays: layers are a handful of nodes, where numpy's cost per call is all there would be.

    Attributes:
        plan: depth, width and stop rule.
        token, parent, logp: per node, as in `TokenTree`.
        first_choice: per node, the drafter's most likely next token; -1 where it was not forwarded.
        slot: per node, its KV slot; -1 where it was not forwarded, and for the root, whose KV is part of
            the context.
        frontier: nodes to forward and expand next; empty once the tree is finished.
        depth: layers so far.
        layer: nodes of the last layer; none while there is only the root.
    """

    __slots__ = (
        "_ancestors",
        "_node_depth",
        "_num_forwarded",
        "_slots",
        "_stops",
        "depth",
        "first_choice",
        "frontier",
        "layer",
        "logp",
        "parent",
        "plan",
        "slot",
        "token",
    )

    def __init__(self, root: int, plan: DraftPlan, stops: frozenset[int] = frozenset()) -> None:
        """A tree of the root alone; `stops` are the tokens after which generation ends."""
        self.plan = plan
        self.token = [root]
        self.parent = [NONE]
        self.logp = [0.0]
        self.first_choice = [NONE]
        self.slot = [NONE]
        self.frontier = [0]
        self.depth = 0
        self.layer = range(0)
        self._stops = stops
        self._node_depth = [0]
        self._ancestors: Bool | None = None  # [frontier, nodes forwarded]
        self._slots: list[Int32] = []  # of the nodes forwarded, by layer
        self._num_forwarded = 0

    def grow(self, logp: Sequence[Sequence[float]], token: Sequence[Sequence[int]]) -> None:
        """Add the next layer.

        Args:
            logp: per frontier node, log-probabilities of its best next tokens, descending; at least
                `width` of them unless the vocabulary is smaller.
            token: per frontier node, those tokens.
        """
        width, frontier = self.plan.width, self.frontier
        for node, tokens in zip(frontier, token, strict=True):
            self.first_choice[node] = tokens[0]
        if self.depth >= self.plan.depth:
            self.frontier = []
            return
        candidates = [
            (-self.logp[node] - value, row, choice)  # in order: likely first, ties as in a full sort
            for row, (node, values) in enumerate(zip(frontier, logp, strict=True))
            for choice, value in enumerate(values[:width])
            if value > -np.inf  # ruled out: by min_tokens, top-p, a bias of minus infinity
        ]
        if len(frontier) > 1:
            candidates.sort()
            del candidates[width:]
        self.depth += 1
        size = len(self.token)
        rows: list[int] = []  # of the new frontier nodes' parents in the old frontier
        self.frontier = []
        for node, (loss, row, choice) in enumerate(candidates, start=size):
            child = token[row][choice]
            self.token.append(child)
            self.parent.append(frontier[row])
            self.logp.append(-loss)
            if child not in self._stops and logp[row][choice] >= self.plan.stop_token_logp:
                self.frontier.append(node)
                rows.append(row)
        added = len(candidates)
        self.layer = range(size, size + added)
        self.first_choice += [NONE] * added
        self.slot += [NONE] * added
        self._node_depth += [self.depth] * added
        if not added or self.depth >= self.plan.depth or -candidates[0][0] < self.plan.stop_logp:
            self.frontier = []
        elif self._ancestors is not None:
            self._ancestors = self._ancestors[rows]

    @property
    def choices(self) -> int:
        """Next tokens `grow` makes use of, per frontier node."""
        return self.plan.width if self.depth < self.plan.depth else 1

    def acceptance(self, nodes: Iterable[int]) -> list[float]:
        """Product of the drafter's probabilities from the root to each of `nodes` (the papers' AR, f)."""
        return [math.exp(self.logp[node]) for node in nodes]

    def stop(self) -> None:
        """Finish the tree as it stands."""
        self.frontier = []

    def forwarding(self, slots: Int32) -> tuple[list[Int32], Bool | None]:
        """Note that the frontier is forwarded into `slots` (int32 [live]) and say what its rows may see.

        Returns:
            the slots of the tree nodes forwarded in earlier layers, in order (they follow the context in
            `Segment.past`), and the `visible` of `Segment`: bool [live, forwarded before + live], or
            None for a chain, where causal is right.
        """
        for node, slot in zip(self.frontier, slots.tolist(), strict=True):
            self.slot[node] = slot
        earlier = self._slots.copy()
        self._slots.append(slots)
        if self.plan.width == 1:
            return earlier, None
        before, live = self._num_forwarded, len(slots)
        visible = np.zeros((live, before + live), dtype=np.bool_)
        if self._ancestors is not None:
            visible[:, :before] = self._ancestors
        visible.ravel()[before :: before + live + 1] = True  # the diagonal of the last `live` columns
        self._ancestors = visible
        self._num_forwarded += live
        return earlier, visible

    def tree(self) -> TokenTree:
        """The candidate tree grown so far; at most `width` nodes per layer, best path first in each."""
        return TokenTree(
            token=np.array(self.token, dtype=np.int32),
            parent=np.array(self.parent, dtype=np.int32),
            logp=np.array(self.logp, dtype=np.float32),
            depth=np.array(self._node_depth, dtype=np.int32),
        )

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the first below the root down to `node`; none for the root."""
        tokens = []
        while node > 0:
            tokens.append(self.token[node])
            node = self.parent[node]
        return tokens[::-1]

    def child(self, node: int, token: int) -> int:
        """The child of `node` that holds `token`, or -1."""
        for other in range(node + 1, len(self.token)):
            if self.parent[other] == node and self.token[other] == token:
                return other
        return NONE

    def lose_slots(self) -> None:
        """The slots of the nodes are taken back; what the drafter chose after them remains known."""
        self.slot = [NONE] * len(self.slot)
