"""FCFS with a batch limit that follows the TPOT objectives: the FCFS of AdaServe v1 (arXiv 2025), figure 7.

"In our setting, these strategies are SLO-aware, dynamically adjusting batch size limits to accommodate TPOT
SLOs. When urgent requests exist, batch sizes are kept small [...], with requests preempted according to the
scheduling policy." Preempted means here that a request waits with its KV kept, as its overhead is said to be
that it "must wait to join a new batch".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cluster.batching.base import Admission, BatchContext
from cluster.batching.common import arrival_order, batch_limit, fill, first_few
from cluster.batching.fcfs import Fcfs
from cluster.requests import Request


class FcfsSlo(Fcfs):
    """As `fcfs`, in batches small enough for the strictest objective among the running requests."""

    def admit(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> Admission:
        """In arrival order up to the batch limit of those running and the next to come."""
        if not waiting:
            return Admission()
        return fill(waiting, running, context, batch_limit([*running, waiting[0]], context))

    def decode(
        self, ready: Sequence[Request], members: Collection[Request], context: BatchContext
    ) -> list[Request]:
        """The first to come, up to the batch limit."""
        return first_few(ready, members, context, arrival_order)
