"""Drafting ahead: computing likely continuations of a draft while the target verifies it.

What the target will commit is not known yet, so the next tokens are computed in the order of their path
probability, whichever branch they are on: the token after a fully accepted draft as well as second choices
on the way. That order is the one that saves most: a node computed now saves a row later exactly if the
committed tokens run through it. PEARL (arXiv 2408.11850, "post-verify") does so along one chain, for the case
that all is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from drafters.computed_tree import ComputedTree
from drafters.job import Job

# Rows of one forward ahead, over all requests: short, because the next call waits for the one running.
ROWS = 3
# Best next tokens of a node that are candidates.
CHOICES = 2
# Paths less likely than this are not worth a row.
LEAST_LOGP = math.log(0.002)
# Nodes computed ahead for all requests of a call together, so that many of them do not keep the memory busy
# that the target reads its weights from; and layers below the root, at most.
NODES = 160
LAYERS = 32


class DraftAhead:
    """What one draft call left to compute ahead."""

    def __init__(self, jobs: Sequence[Job], max_tokens: int) -> None:
        """Go on from the `jobs` of a call that is answered; `max_tokens` is the model's longest sequence."""
        self._queues = [_Queue(job, max_tokens, NODES // len(jobs)) for job in jobs]

    def next_nodes(self) -> list[tuple[Job, list[int]]]:
        """The likeliest nodes to compute next, per job, parents before children; none when it is enough."""
        queues = [queue for queue in self._queues if queue.is_valid]
        self._queues = queues
        rows = max(1, ROWS // max(1, len(queues)))
        picked = [(queue.job, queue.pop(rows)) for queue in queues]
        return [(job, nodes) for job, nodes in picked if nodes]


class _Queue:
    """Nodes of one request's tree that may be computed, likeliest first."""

    def __init__(self, job: Job, max_tokens: int, num_nodes: int) -> None:
        self.job = job
        self._tree: ComputedTree = job.tree
        held = job.held
        length = len(held.tokens)
        left = held.spec.prompt_len + held.spec.sampling.max_tokens - length
        self._layers = min(LAYERS, max_tokens - length, left - 1)
        self._left = num_nodes
        self._offered: list[int] = []
        self._heap = [
            entry
            for node in range(len(self._tree))
            if self._tree.is_computed(node)
            for entry in self._open(node)
        ]
        heapify(self._heap)

    @property
    def is_valid(self) -> bool:
        """Whether the request still stands where the call left it, and there is something to compute."""
        return (
            self.job.held.tree is self._tree
            and self._tree.has_slots
            and bool(self._heap or self._offered)
            and self._left > 0
        )

    def pop(self, rows: int) -> list[int]:
        """Up to `rows` nodes; the caller computes them before asking again."""
        for node in self._offered:
            if self._tree.is_computed(node):
                for entry in self._open(node):
                    heappush(self._heap, entry)
        nodes: list[int] = []
        while self._heap and len(nodes) < min(rows, self._left):
            loss, parent, token = heappop(self._heap)
            nodes.append(self._tree.add(parent, token, -loss))
        self._left -= len(nodes)
        self._offered = nodes
        return nodes

    def _open(self, node: int) -> list[tuple[float, int, int]]:
        """Entries of the children of a computed node that may be computed."""
        tree, stops = self._tree, self.job.held.stops
        if tree.depth[node] >= self._layers:
            return []
        return [
            (-logp, node, token)
            for logp, token in tree.open_choices(node, CHOICES)
            if logp >= LEAST_LOGP and token not in stops
        ]
