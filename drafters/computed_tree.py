"""What a drafter has computed beyond one request's committed tokens: KV slots and best next tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.runner import Segment

Int32 = NDArray[np.int32]

NONE = -1
ROOT = 0


@dataclass(frozen=True, slots=True)
class Followed:
    """How far newly committed tokens run along a tree.

    Attributes:
        scored: of the tokens, how many the drafter had a first choice for.
        agreed: how many of those were its first choice.
        path: nodes with KV from below the root on, in order.
        node: the node of the last token, or -1 if the tree does not hold it.
    """

    scored: int
    agreed: int
    path: list[int]
    node: int


class ComputedTree:
    """Tokens that may follow the last committed one, and the forwards already run on them.

    A node is *computed* once it was forwarded: it has a KV slot and its best next tokens are known. The
    root is the last committed token; its KV is part of the context. A candidate tree (`Beam`) grows on
    what is computed already and asks for forwards where it is not; drafting ahead computes nodes nobody
    has asked for yet. Either way the candidates are the same, only the time they take differs.

    Attributes:
        num_choices: best next tokens kept per computed node.
        token, parent, depth, logp: per node, as in `TokenTree`.
        values, choices: per node, log-probabilities of its best next tokens, descending, and the tokens;
            empty where it was not computed.
        slot: per node, its KV slot; -1 where it was not computed, and for the root.
        has_slots: whether the slots are still held.
    """

    __slots__ = (
        "_children",
        "_column",
        "_num_computed",
        "_slots",
        "choices",
        "depth",
        "has_slots",
        "logp",
        "num_choices",
        "parent",
        "slot",
        "token",
        "values",
    )

    def __init__(self, root: int, num_choices: int) -> None:
        """A tree of the root token alone, not computed yet."""
        self.num_choices = num_choices
        self.token = [root]
        self.parent = [NONE]
        self.depth = [0]
        self.logp = [0.0]
        self.values: list[Sequence[float]] = [()]
        self.choices: list[Sequence[int]] = [()]
        self.slot = [NONE]
        self.has_slots = True
        self._children: list[dict[int, int]] = [{}]
        self._column = [NONE]  # among the keys after the context, per node
        self._slots: list[Int32] = []  # of those keys, in order
        self._num_computed = 0

    def __len__(self) -> int:
        return len(self.token)

    def is_computed(self, node: int) -> bool:
        """Whether the best next tokens of `node` are known."""
        return len(self.choices[node]) > 0

    def child(self, node: int, token: int) -> int:
        """The child of `node` that holds `token`, or -1."""
        return self._children[node].get(token, NONE)

    def add(self, node: int, token: int, logp: float) -> int:
        """The child of `node` that holds `token`, made if there is none; `logp` is its path's."""
        known = self._children[node].get(token)
        if known is not None:
            return known
        child = len(self.token)
        self._children[node][token] = child
        self._children.append({})
        self.token.append(token)
        self.parent.append(node)
        self.depth.append(self.depth[node] + 1)
        self.logp.append(logp)
        self.values.append(())
        self.choices.append(())
        self.slot.append(NONE)
        self._column.append(NONE)
        return child

    def learn(self, node: int, values: Sequence[float], choices: Sequence[int]) -> None:
        """Note the best next tokens of `node`."""
        self.values[node] = values
        self.choices[node] = choices

    def segment(self, nodes: Sequence[int], slots: Int32, past: Int32, length: int) -> Segment:
        """The forward of `nodes`, whose parents are computed or the root, into `slots`.

        Args:
            nodes: nodes not computed yet.
            slots: int32 [nodes].
            past: int32 [length], slots of the committed tokens, the root's among them.
            length: committed tokens.
        """
        before, rows = self._num_computed, len(nodes)
        is_chain = rows == 1 and self.depth[nodes[0]] == before + 1
        visible = None
        for column, (node, slot) in enumerate(zip(nodes, slots.tolist(), strict=True), start=before):
            self.slot[node] = slot
            self._column[node] = column
        if not is_chain:
            visible = np.zeros((rows, before + rows), dtype=np.bool_)
            for row, node in enumerate(nodes):
                at = node
                while at != ROOT:
                    visible[row, self._column[at]] = True
                    at = self.parent[at]
        segment = Segment(
            tokens=np.array([self.token[node] for node in nodes], dtype=np.int32),
            positions=np.array([length - 1 + self.depth[node] for node in nodes], dtype=np.int32),
            slots=slots,
            past=np.concatenate((past, *self._slots)) if self._slots else past,
            visible=visible,
        )
        self._slots.append(slots)
        self._num_computed += rows
        return segment

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the first below the root down to `node`; none for the root."""
        tokens = []
        while node != ROOT:
            tokens.append(self.token[node])
            node = self.parent[node]
        return tokens[::-1]

    def above(self, node: int) -> list[int]:
        """Nodes between the root and `node`, both excluded, from the top."""
        nodes = []
        while (node := self.parent[node]) > ROOT:
            nodes.append(node)
        return nodes[::-1]

    def follow(self, tokens: Sequence[int]) -> Followed:
        """Walk from the root along `tokens`."""
        node, scored, agreed, path = ROOT, 0, 0, list[int]()
        for token in tokens:
            if not self.is_computed(node):
                return Followed(scored, agreed, path, NONE)
            scored += 1
            agreed += self.choices[node][0] == token
            node = self.child(node, token)
            if node == NONE:
                return Followed(scored, agreed, path, NONE)
            if self.slot[node] != NONE and self.has_slots:
                path.append(node)
        return Followed(scored, agreed, path, node)

    def subtree(self, root: int) -> ComputedTree:
        """The tree below `root`, which is computed and becomes the last committed token."""
        tree = ComputedTree(self.token[root], self.num_choices)
        tree.learn(ROOT, self.values[root], self.choices[root])
        new = {root: ROOT}
        base = self.logp[root]
        kept: list[tuple[int, int]] = []
        for old in range(root + 1, len(self.token)):  # parents come before their children
            parent = new.get(self.parent[old])
            if parent is None:
                continue
            node = new[old] = tree.add(parent, self.token[old], self.logp[old] - base)
            if self.slot[old] != NONE:
                tree.learn(node, self.values[old], self.choices[old])
                kept.append((node, self.slot[old]))
        if kept:
            tree.hold(kept)
        return tree

    def hold(self, kept: Sequence[tuple[int, int]]) -> None:
        """Give computed nodes the slots they hold: pairs of node and slot."""
        for column, (node, slot) in enumerate(kept, start=self._num_computed):
            self.slot[node] = slot
            self._column[node] = column
        self._slots.append(np.array([slot for _, slot in kept], dtype=np.int32))
        self._num_computed += len(kept)

    @property
    def slots(self) -> list[Int32]:
        """Slots of the computed nodes below the root."""
        return self._slots

    def open_choices(self, node: int, most: int) -> Iterator[tuple[float, int]]:
        """Path log-probability and token of the `most` best next tokens of `node` that are not computed."""
        base = self.logp[node]
        for value, token in zip(self.values[node][:most], self.choices[node][:most], strict=True):
            child = self.child(node, token)
            if child == NONE or not self.is_computed(child):
                yield base + value, token
