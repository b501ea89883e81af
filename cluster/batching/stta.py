"""Shortest time to attain: who is closest to violating its TPOT objective decodes first.

AdaServe v1 (arXiv 2025), section 6.3 and figure 7: "STTA prioritizes requests closest to violating their TPOT
SLOs during each iteration", in batches whose limit follows the objectives, as for `fcfs-slo`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cluster.admission import slack_s
from cluster.batching.base import Admission, BatchContext
from cluster.batching.common import arrival_order, fill, first_few, tpot_s
from cluster.batching.fcfs import Fcfs
from cluster.requests import Request


class Stta(Fcfs):
    """Prefill priority, then the requests nearest to a violation, as many as the objectives allow."""

    def admit(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> Admission:
        """The strictest objective first, then by arrival; whoever has room, since others can be held back."""
        ordered = sorted(waiting, key=lambda r: (r.submit.priority, tpot_s(r), r.order))
        return fill(ordered, running, context)

    def decode(
        self, ready: Sequence[Request], members: Collection[Request], context: BatchContext
    ) -> list[Request]:
        """By ascending slack against the objective, up to the batch limit."""
        return first_few(
            ready,
            members,
            context,
            lambda r: (slack_s(r, context.now, context.step_s), *arrival_order(r)),
        )
