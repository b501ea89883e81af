"""Growing a tree from what was proposed beside the target: a beam, or quicker the chain that a narrow one is.

The scheduler, or the target, waits for it in every step, for all requests one after the other, so that plain
numbers are read from the proposals once. Both of them grow the same tree from the same proposals and plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.beam import Beam
from engine.draft_plan import DraftPlan
from engine.proposals import Proposals
from engine.tree import TokenTree

# Parents and depths of the chains that there usually are; a deeper one has its own.
_USUAL_NODES = 65
_PARENTS = np.arange(-1, _USUAL_NODES - 1, dtype=np.int32)
_DEPTHS = np.arange(_USUAL_NODES, dtype=np.int32)
for _array in (_PARENTS, _DEPTHS):
    _array.flags.writeable = False


class Layers:
    """Proposals as plain numbers.

    Attributes:
        position: length of the sequence that they follow.
        token, logp: per layer, of its candidates, the best first.
        parent: per layer, of its candidates the place in the layer before; None if any one is a parent.
    """

    __slots__ = ("logp", "parent", "position", "token")

    def __init__(self, proposals: Proposals) -> None:
        self.position = proposals.position
        self.token: list[list[int]] = proposals.token.tolist()
        self.logp: list[list[float]] = proposals.logp.tolist()
        self.parent: list[list[int]] | None = None if proposals.parent is None else proposals.parent.tolist()

    def __len__(self) -> int:
        return len(self.token)

    def children(self, layer: int, place: int) -> list[int]:
        """Places in a layer (from 0) of the candidates after the one at `place` of the layer before."""
        if self.parent is None:
            return list(range(len(self.token[layer])))
        return [child for child, above in enumerate(self.parent[layer]) if above == place]

    def score(self, came: Sequence[int]) -> tuple[int, int]:
        """How far first choices follow the tokens that came after `position`: (scored, agreed).

        A chain of heads' first choices is scored up to its first error, like the draft it would have been: so
        the rate is that of drafted tokens, and falls as it should where later heads are weaker. In a beam the
        first choice after each token that came is scored, as far as the beam holds them.
        """
        scored = agreed = place = 0
        for layer, token in enumerate(came[: len(self)]):
            choices, tokens = self.children(layer, place), self.token[layer]
            if not choices:
                break
            scored += 1
            is_first = tokens[choices[0]] == token
            agreed += is_first
            followed = next((one for one in choices if tokens[one] == token), None)
            if followed is None or (self.parent is None and not is_first):
                break
            place = followed
        return scored, agreed


class Growth(Protocol):
    """A tree that grows layer by layer."""

    def grow(self) -> bool:
        """Add a layer, if there is one to add."""
        ...

    def last_acceptance(self) -> list[float]:
        """Product of the drafter's probabilities along the path to each node of the last layer (AR, f)."""
        ...

    def open_acceptance(self) -> list[float]:
        """The same of the nodes that would get children."""
        ...

    def tree(self) -> TokenTree:
        """As grown so far."""
        ...


def growth(root: int, plan: DraftPlan, stops: frozenset[int], layers: Layers | None) -> Growth:
    """A tree of the root alone; without layers it stays that."""
    if layers is None or plan.depth < 1:
        return RootAlone(root)
    if plan.width == 1:
        return ChainGrowth(root, plan, stops, layers)
    return BeamGrowth(root, plan, stops, layers)


def grown(root: int, plan: DraftPlan, stops: frozenset[int], proposals: Proposals | None) -> TokenTree:
    """The whole tree, as deep as the plan and what was proposed allow."""
    if proposals is None or plan.depth < 1:
        return TokenTree.root_only(root)
    if plan.width == 1:
        if proposals.token.shape[1] == 1:  # nothing is to be chosen
            tokens, logps = proposals.token.ravel().tolist(), proposals.logp.ravel().tolist()
        else:
            tokens, logps = _first_choices(Layers(proposals))
        token, logp, _ = _cut(root, plan, stops, tokens, logps)
        return _chain(token, logp)
    tree = BeamGrowth(root, plan, stops, Layers(proposals))
    while tree.grow():
        pass
    return tree.tree()


class RootAlone:
    """Nothing was proposed: the root stays alone."""

    __slots__ = ("_root",)

    def __init__(self, root: int) -> None:
        self._root = root

    def grow(self) -> bool:
        """See `Growth`."""
        return False

    def last_acceptance(self) -> list[float]:
        """See `Growth`."""
        return []

    def open_acceptance(self) -> list[float]:
        """See `Growth`."""
        return []

    def tree(self) -> TokenTree:
        """See `Growth`."""
        return TokenTree.root_only(self._root)


class BeamGrowth:
    """The best paths of each layer, as many as the plan is wide (`engine.beam`)."""

    __slots__ = ("_beam", "_layers", "_places")

    def __init__(self, root: int, plan: DraftPlan, stops: frozenset[int], layers: Layers) -> None:
        self._beam = Beam(root, plan, stops)
        self._layers = layers
        # Per node of the beam, its place among its layer's candidates.
        self._places = [0]

    def grow(self) -> bool:
        """See `Growth`."""
        beam, layers = self._beam, self._layers
        if not beam.frontier or beam.depth >= min(beam.plan.depth, len(layers)):
            return False
        layer, frontier = beam.depth, beam.frontier
        token, logp = layers.token[layer], layers.logp[layer]
        if layers.parent is None:
            beam.grow([logp] * len(frontier), [token] * len(frontier))
            return bool(beam.layer)
        found = [layers.children(layer, self._places[node]) for node in frontier]
        beam.grow([[logp[at] for at in row] for row in found], [[token[at] for at in row] for row in found])
        place: dict[tuple[int, int], int] = {}
        for node, row in zip(frontier, found, strict=True):
            for at in row:  # the best first: tokens that are ruled out may repeat it
                place.setdefault((node, token[at]), at)
        self._places += [place[beam.parent[node], beam.token[node]] for node in beam.layer]
        return bool(beam.layer)

    def last_acceptance(self) -> list[float]:
        """See `Growth`."""
        return self._beam.acceptance(self._beam.layer)

    def open_acceptance(self) -> list[float]:
        """See `Growth`."""
        return self._beam.acceptance(self._beam.frontier)

    def tree(self) -> TokenTree:
        """See `Growth`."""
        beam = self._beam
        return beam.tree() if len(beam.token) > 1 else TokenTree.root_only(beam.token[0])


class ChainGrowth:
    """What `BeamGrowth` gives where a plan is one wide: the first choice after the first choice."""

    __slots__ = ("_depth", "_is_open", "_logp", "_token")

    def __init__(self, root: int, plan: DraftPlan, stops: frozenset[int], layers: Layers) -> None:
        self._token, self._logp, is_open = _cut(root, plan, stops, *_first_choices(layers))
        # Of the last node; those before it have a child.
        self._is_open = is_open and len(self._token) <= plan.depth
        self._depth = 0

    def grow(self) -> bool:
        """See `Growth`."""
        if self._depth + 1 >= len(self._token):
            return False
        self._depth += 1
        return True

    def last_acceptance(self) -> list[float]:
        """See `Growth`."""
        return [math.exp(self._logp[self._depth])]

    def open_acceptance(self) -> list[float]:
        """See `Growth`."""
        is_last = self._depth + 1 == len(self._token)
        return [] if is_last and not self._is_open else [math.exp(self._logp[self._depth])]

    def tree(self) -> TokenTree:
        """See `Growth`."""
        n = self._depth + 1
        return _chain(self._token[:n], self._logp[:n])


def _chain(token: list[int], logp: list[float]) -> TokenTree:
    """The chain of these nodes."""
    n = len(token)
    if n == 1:
        return TokenTree.root_only(token[0])
    is_usual = n <= _USUAL_NODES
    return TokenTree(
        np.array(token, np.int32),
        _PARENTS[:n] if is_usual else np.arange(-1, n - 1, dtype=np.int32),
        np.array(logp, np.float32),
        _DEPTHS[:n] if is_usual else np.arange(n, dtype=np.int32),
    )


def _cut(
    root: int, plan: DraftPlan, stops: frozenset[int], tokens: Sequence[int], logps: Sequence[float]
) -> tuple[list[int], list[float], bool]:
    """As much of a chain as the plan allows: its tokens, log-probabilities of the paths to them, and whether
    the last one might have a child."""
    token, logp, path = [root], [0.0], 0.0
    least, least_path = plan.stop_token_logp, plan.stop_logp
    for child, value in zip(tokens[: plan.depth], logps, strict=False):
        if not value > -math.inf:  # ruled out, or no number: what overflowed proposes nothing
            break
        path += value
        token.append(child)
        logp.append(path)
        if value < least or path < least_path or child in stops:
            return token, logp, False
    return token, logp, True


def _first_choices(layers: Layers) -> tuple[list[int], list[float]]:
    """The first choice after the first choice, layer by layer, and their log-probabilities."""
    tokens: list[int] = []
    logps: list[float] = []
    place = 0
    for layer, choices in enumerate(layers.token):
        place = 0 if layers.parent is None else _first(layers.parent[layer], place)
        if not 0 <= place < len(choices):
            break
        tokens.append(choices[place])
        logps.append(layers.logp[layer][place])
    return tokens, logps


def _first(parents: list[int], place: int) -> int:
    """The first candidate after that at `place`; -1 if it has none."""
    if parents and parents[0] == place:  # the best path comes first
        return 0
    try:
        return parents.index(place)
    except ValueError:
        return -1
