"""Separate pipelines: requests of different services never share a batch.

AdaServe v1 (arXiv 2025), section 6.3 and figure 7: "SepPipe [...] uses separate pipelines to serve requests
from different services. Each pipeline operates with its own model replica and runs continuous batching."
A cell has one target, so the pipelines take turns on it, and share its places evenly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from cluster.batching.base import Admission, BatchContext, Chunk
from cluster.batching.common import arrival_order, whole_prompts
from cluster.batching.fcfs import Fcfs
from cluster.requests import Request

Pipeline = tuple[str, float]


def pipeline(request: Request) -> Pipeline:
    """Which pipeline a request belongs to: its tier, and within a tier its TPOT objective."""
    return (request.submit.tier, request.submit.objective.tpot_ms or 0.0)


class SepPipe(Fcfs):
    """First come, first served with prefill priority within each; the one served longest ago is next."""

    def admit(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> Admission:
        """In arrival order, each pipeline up to an even share of the places."""
        counts: dict[Pipeline, int] = {pipeline(request): 0 for request in waiting}
        for request in running:
            counts[pipeline(request)] = counts.get(pipeline(request), 0) + 1
        share = max(1, context.max_running // max(1, len(counts)))
        room = context.room(running)
        admitted = []
        for request in waiting:
            if counts[pipeline(request)] >= share:
                continue
            if not room.takes(request):
                break
            room.take(request)
            counts[pipeline(request)] += 1
            admitted.append(request)
        return Admission(admitted)

    def verify(
        self, drafted: Sequence[Request], prefilling: Sequence[Request], running: Collection[Request]
    ) -> list[Request]:
        """Those of the pipeline whose turn it is, unless it has prompts to prefill."""
        if not drafted:
            return []
        turn = _turn([*drafted, *prefilling], running)
        if any(pipeline(request) == turn for request in prefilling):
            return []
        return [request for request in drafted if pipeline(request) == turn]

    def prefill(
        self,
        prefilling: Sequence[Request],
        verifying: Sequence[Request],
        num_rows: int,
        running: Collection[Request],
        context: BatchContext,
    ) -> list[Chunk]:
        """Whole prompts of the pipeline whose turn it is, in a call of their own."""
        if verifying or not prefilling:
            return []
        turn = _turn(prefilling, running)
        mine = [request for request in prefilling if pipeline(request) == turn]
        return whole_prompts(sorted(mine, key=arrival_order), context.whole_tokens)


def _turn(candidates: Iterable[Request], running: Collection[Request]) -> Pipeline:
    """Of the pipelines with work, the one served longest ago; then the one with the earliest request."""
    served: dict[Pipeline, float] = {}
    for request in running:
        last = float("-inf") if request.last_served_at is None else request.last_served_at
        served[pipeline(request)] = max(served.get(pipeline(request), last), last)
    first = min(candidates, key=lambda r: (served[pipeline(r)], r.order))
    return pipeline(first)
