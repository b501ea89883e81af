"""Beam growth of one candidate tree (AdaServe, step 1 "Speculate"), free of models and KV caches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from engine.draft_plan import DraftPlan
from engine.tree import TokenTree

NONE = -1


class Beam:
    """The candidate tree of one request while it grows, one layer per model forward.

    The *frontier* is the nodes whose children come next. Each round is: find the best next tokens after each
    of them (see `ComputedTree`), and hand those to `grow`, which keeps the `width` best paths as the new
    layer. A node that is a stop token, or that its model is not sure enough of (`DraftPlan.stop_token_logp`),
    stays a leaf.

    Lists and not arrays: layers are a handful of nodes, where numpy's cost per call is all there would be.

    Attributes:
        plan: depth, width and stop rule.
        stops: tokens after which generation ends.
        token, parent, logp: per node, as in `TokenTree`.
        frontier: nodes to expand next; empty once the tree is finished.
        depth: layers so far.
        layer: nodes of the last layer; none while there is only the root.
    """

    __slots__ = (
        "_node_depth",
        "depth",
        "frontier",
        "layer",
        "logp",
        "parent",
        "plan",
        "stops",
        "token",
    )

    def __init__(self, root: int, plan: DraftPlan, stops: frozenset[int] = frozenset()) -> None:
        """A tree of the root alone."""
        self.plan = plan
        self.token = [root]
        self.parent = [NONE]
        self.logp = [0.0]
        self.frontier = [0]
        self.depth = 0
        self.layer = range(0)
        self.stops = stops
        self._node_depth = [0]

    def grow(self, logp: Sequence[Sequence[float]], token: Sequence[Sequence[int]]) -> None:
        """Add the next layer.

        Args:
            logp: per frontier node, log-probabilities of its best next tokens, descending; at least
                `width` of them unless the vocabulary is smaller.
            token: per frontier node, those tokens.
        """
        width, frontier = self.plan.width, self.frontier
        if self.depth >= self.plan.depth:
            self.frontier = []
            return
        candidates = [
            (-self.logp[node] - value, row, choice)  # in order: likely first, ties as in a full sort
            for row, (node, values) in enumerate(zip(frontier, logp, strict=True))
            for choice, value in enumerate(values[:width])
            # Others are ruled out (by min_tokens, top-p, a bias of minus infinity), or no numbers.
            if value > -np.inf
        ]
        if len(frontier) > 1:
            candidates.sort()
            del candidates[width:]
        self.depth += 1
        size = len(self.token)
        self.frontier = []
        for node, (loss, row, choice) in enumerate(candidates, start=size):
            child = token[row][choice]
            self.token.append(child)
            self.parent.append(frontier[row])
            self.logp.append(-loss)
            if child not in self.stops and logp[row][choice] >= self.plan.stop_token_logp:
                self.frontier.append(node)
        added = len(candidates)
        self.layer = range(size, size + added)
        self._node_depth += [self.depth] * added
        if not added or self.depth >= self.plan.depth or -candidates[0][0] < self.plan.stop_logp:
            self.frontier = []

    @property
    def deserves_forward(self) -> bool:
        """Whether the frontier is likely enough to be forwarded (`DraftPlan.least_forward_logp`)."""
        return max(self.logp[node] for node in self.frontier) >= self.plan.least_forward_logp

    def acceptance(self, nodes: Iterable[int]) -> list[float]:
        """Product of the drafter's probabilities from the root to each of `nodes` (the papers' AR, f)."""
        return [math.exp(self.logp[node]) for node in nodes]

    def stop(self) -> None:
        """Finish the tree as it stands."""
        self.frontier = []

    def tree(self) -> TokenTree:
        """The candidate tree grown so far; at most `width` nodes per layer, best path first in each."""
        return TokenTree(
            token=np.array(self.token, dtype=np.int32),
            parent=np.array(self.parent, dtype=np.int32),
            logp=np.array(self.logp, dtype=np.float32),
            depth=np.array(self._node_depth, dtype=np.int32),
        )
