"""Urgent requests first while the others wait.

The vLLM + Priority baseline of AdaServe (EuroSys 2026), figure 1: it "attempts to address urgent requests by
constraining batch sizes and preempting non-urgent requests during decoding".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cluster.batching.base import Admission, BatchContext, Chunk
from cluster.batching.common import awaits_drafts, chunked, first_few, make_room, may_leave, tpot_s
from cluster.batching.sarathi import Sarathi
from cluster.requests import Request


def urgency(request: Request) -> tuple[int, float]:
    """Groups of requests, the most urgent lowest: by own priority, then by how strict the objective is."""
    return (request.submit.priority, tpot_s(request))


def _by_urgency(request: Request) -> tuple[int, float, int]:
    return (*urgency(request), request.order)


class Priority(Sarathi):
    """Groups by urgency; within a group by arrival. Prompts in chunks, as vLLM's V1 engine does it."""

    def admit(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> Admission:
        """The most urgent first; where there is no room, less urgent running requests give up their KV."""
        room = context.room(running)
        least_urgent_last = sorted((r for r in running if may_leave(r, context)), key=_by_urgency)
        admitted: list[Request] = []
        preempted: list[Request] = []
        for request in sorted(waiting, key=_by_urgency):
            if not room.takes(request):
                less_urgent = (r for r in reversed(least_urgent_last) if urgency(r) > urgency(request))
                victims = make_room(request, less_urgent, room)
                if not victims:
                    break
                for victim in victims:
                    least_urgent_last.remove(victim)
                    room.give_back(victim)
                preempted.extend(victims)
            room.take(request)
            admitted.append(request)
        return Admission(admitted, preempted)

    def may_take_place(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> bool:
        """Whether somebody waits who is more urgent than one who runs (`TakesPlaces`)."""
        return bool(waiting) and bool(running) and min(map(urgency, waiting)) < max(map(urgency, running))

    def decode(
        self, ready: Sequence[Request], members: Collection[Request], context: BatchContext
    ) -> list[Request]:
        """The most urgent, up to the batch limit of the strictest objective; the others wait."""
        return first_few(ready, members, context, _by_urgency)

    def prefill(
        self,
        prefilling: Sequence[Request],
        verifying: Sequence[Request],
        num_rows: int,
        running: Collection[Request],
        context: BatchContext,
    ) -> list[Chunk]:
        """Chunks by urgency."""
        if awaits_drafts(verifying, running, context):
            return []
        return chunked(sorted(prefilling, key=_by_urgency), context.chunk_tokens)
