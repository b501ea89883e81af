"""Draft trees under a grammar: which tokens may follow each node, and which nodes can be reached at all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.grammar import GrammarError
from engine.mask_bits import TokenMask, holds, only_token, without
from engine.matcher import Matcher
from engine.tree import TokenTree

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class MaskedTree:
    """A draft tree without the nodes that the grammar forbids, and with tokens it leaves no choice about.

    Attributes:
        tree: what is verified.
        nodes: int32 [len(tree)], their indices in the tree that was drafted; -1 for those added.
        masks: per node of `tree`, what may follow it.
    """

    tree: TokenTree
    nodes: Int32
    masks: list[TokenMask]

    @property
    def num_forced(self) -> int:
        """Nodes added."""
        return int(np.count_nonzero(self.nodes < 0))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What besides the grammar decides about stop tokens and lengths in one step.

    Attributes:
        position: output position of the token after the root.
        min_tokens: stop tokens are impossible before this position, as far as others are allowed.
        stop: tokens that end the request.
        max_depth: no node is deeper.
        max_forced: most nodes added.
    """

    position: int
    min_tokens: int
    stop: Collection[int]
    max_depth: int = 0
    max_forced: int = 0


def mask_tree(matcher: Matcher, tree: TokenTree, bounds: Bounds) -> MaskedTree:
    """Walk `tree` with the grammar: a mask per node, nodes pruned that no mask of a parent allows.

    What is pruned could never be accepted, since the target's choice at the parent is among the allowed
    tokens. Where only one token is allowed, it is that choice whatever the target's logits are, so it is
    added below the node if it was not drafted. A node after which the grammar cannot be followed is pruned,
    too: that is an error only if the target takes the token.

    Raises:
        GrammarError: if the grammar cannot be followed at the root; the matcher is then of no more use.
    """
    tokens, parents, depths = tree.token.tolist(), tree.parent.tolist(), tree.depth.tolist()
    children: list[list[int]] = [[] for _ in tokens]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    masks: list[TokenMask | None] = [None] * len(tokens)
    # Appended to a drafted node or to another added one: its token, its parent's place, its depth.
    added: list[tuple[int, int, int]] = []
    waiting = [0]
    while waiting:
        place = waiting.pop()
        if place < len(tokens):
            token, depth, below = tokens[place], depths[place], children[place]
        else:
            token, _, depth = added[place - len(tokens)]
            below = []
        if place and token in matcher.end_tokens:
            # An answer ends here. If the request goes on regardless, then with end tokens only.
            masks[place] = _with_min_tokens(matcher.ends(), bounds, depth)
            continue
        try:
            if place:
                matcher.enter(token, depth)
            mask = _with_min_tokens(matcher.allowed(), bounds, depth)
        except GrammarError:
            if not place:
                raise
            if place >= len(tokens):
                _, above, _ = added.pop()  # the last one: what is added is walked next
            else:
                above = parents[place]
            _enter_again(matcher, [*zip(tokens, parents, depths, strict=True), *added], above)
            continue
        if place < len(tokens):
            masks[place] = mask
        else:
            masks.append(mask)
        allowed = [node for node in below if holds(mask, tokens[node])]
        waiting.extend(reversed(allowed))
        forced = only_token(mask) if len(added) < bounds.max_forced and depth < bounds.max_depth else None
        if forced is None or forced in matcher.end_tokens or allowed:
            continue
        added.append((forced, place, depth + 1))
        waiting.append(len(tokens) + len(added) - 1)
    matcher.leave()
    return _assemble(tree, masks, added)


def _enter_again(matcher: Matcher, nodes: Sequence[tuple[int, int, int]], place: int) -> None:
    """Be at `place` of `nodes` (token, place of the parent, depth) after an error further down."""
    path = []
    while place:
        token, above, depth = nodes[place]
        path.append((token, depth))
        place = above
    matcher.recover()
    for token, depth in reversed(path):
        matcher.enter(token, depth)


def _with_min_tokens(mask: TokenMask, bounds: Bounds, depth: int) -> TokenMask:
    if bounds.position + depth >= bounds.min_tokens:
        return mask
    rest = without(mask, bounds.stop)
    return rest if rest.any() else mask


def _assemble(
    tree: TokenTree, masks: list[TokenMask | None], added: list[tuple[int, int, int]]
) -> MaskedTree:
    """The nodes that have masks, in order, those added last."""
    kept = [place for place, mask in enumerate(masks) if mask is not None]
    found = [mask for mask in masks if mask is not None]
    drafted = np.array([place for place in kept if place < len(tree)], dtype=np.int32)
    if not added:
        return MaskedTree(tree.subset(drafted), drafted, found)
    new = {place: index for index, place in enumerate(kept)}
    part = tree.subset(drafted)
    logp = part.logp.tolist()
    for _, parent, _ in added:
        logp.append(logp[new[parent]])  # certain, given what is above
    grown = TokenTree(
        token=np.concatenate([part.token, np.array([token for token, _, _ in added], np.int32)]),
        parent=np.concatenate([part.parent, np.array([new[parent] for _, parent, _ in added], np.int32)]),
        logp=np.array(logp, dtype=np.float32),
        depth=np.concatenate([part.depth, np.array([depth for _, _, depth in added], np.int32)]),
    )
    nodes = np.concatenate([drafted, np.full(len(added), -1, dtype=np.int32)])
    return MaskedTree(grown, nodes, found)
