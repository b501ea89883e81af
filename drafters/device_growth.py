"""What a device computes of one request's tree in one call, and where the host finds it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from drafters.computed_tree import NONE, ROOT
from drafters.job import Job
from drafters.next_tokens import Tokens, Values
from engine.beam import Beam

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's rows of one layer.

    Attributes:
        values, tokens: per row, its best next tokens, as `ComputedTree` has them.
        of: which row holds a node, by its parent's row and its token.
    """

    values: Values
    tokens: Tokens
    of: dict[tuple[int, int], int]


@dataclass(slots=True, eq=False)
class Growth:
    """One request's layers on the device.

    Attributes:
        job: its item of the call.
        first_depth: depth of the first layer forwarded.
        num_layers: layers to forward; the children of the last one are chosen on the host.
        frontier: nodes of the tree in the first layer, with their log-probabilities; none if the device knows
            the root only.
        above: computed nodes between the root and the frontier, ascending.
        slots: int32, of the rows, layer by layer.
        rows: per layer, what the device found.
        place: layer and row of nodes of the tree.
    """

    job: Job
    first_depth: int
    num_layers: int
    frontier: list[tuple[int, float]]
    above: list[int]
    slots: Int32
    rows: list[Rows] = field(default_factory=list)
    place: dict[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, *, takes_trees: bool) -> Growth | None:
        """What the device is to do for a job whose `slots` are reserved.

        The root's next tokens are known to the device if not to the host. None if there is nothing to
        forward, or if the host must: where ranking depends on the path, where the runner cannot mask the rows
        of a tree (`takes_trees`), and without slots for all rows.
        """
        plan = job.beam.plan
        if job.held.spec.sampling.needs_history or (plan.width > 1 and not takes_trees):
            return None
        if job.tree.is_computed(ROOT):
            growth = cls._below(job)
        else:
            growth = cls(job, 1, plan.depth - 1, [], [], job.slots)
        if growth is None or not 0 < growth.num_layers * growth.width <= len(job.slots):
            return None
        return growth

    @classmethod
    def _below(cls, job: Job) -> Growth | None:
        """Of a tree that holds computed nodes from earlier calls: from where they end."""
        tree, plan = job.tree, job.beam.plan
        known = Job(job.request_id, job.held, Beam(tree.token[ROOT], plan, job.held.stops), tree)
        known.extend()
        while known.beam.frontier and not known.missing():
            known.extend()
        beam = known.beam
        if not beam.frontier or not beam.deserves_forward:
            return None
        frontier = [(known.nodes[node], beam.logp[node]) for node in beam.frontier]
        above = sorted({node for child, _ in frontier for node in tree.above(child)})
        growth = cls(job, beam.depth, plan.depth - beam.depth, frontier, above, job.slots)
        growth.place = {node: (0, row) for row, (node, _) in enumerate(frontier)}
        return growth

    @property
    def width(self) -> int:
        """Rows of each layer."""
        return self.job.beam.plan.width

    @property
    def above_slots(self) -> Int32:
        """Slots of the nodes above."""
        return np.array([self.job.tree.slot[node] for node in self.above], dtype=np.int32)

    def last_layer(self, nodes: Sequence[int]) -> int:
        """The last of its layers in which some of the nodes are; -1 if none is."""
        layers = [self.job.tree.depth[node] - self.first_depth for node in nodes]
        return max((layer for layer in layers if layer < self.num_layers), default=-1)

    def find(self, node: int) -> tuple[int, int] | None:
        """Layer and row of a node; None if the device did not forward it."""
        known = self.place.get(node)
        tree, layer = self.job.tree, self.job.tree.depth[node] - self.first_depth
        if known is not None or not 0 <= layer < self.num_layers or (layer == 0 and self.frontier):
            return known
        parent = self.find(tree.parent[node]) if layer else (NONE, 0)
        row = None if parent is None else self.rows[layer].of.get((parent[1], tree.token[node]))
        if row is None:
            return None
        self.place[node] = layer, row
        return layer, row
