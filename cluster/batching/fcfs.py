"""First come, first served with prefill priority: whole prompts first, decoding waits.

vLLM before its V1 engine (SOSP 2023) by default; AdaServe v1 (arXiv 2025, section 6) describes its IncrDec
baseline so: "new requests [...] preempt ongoing decoding during the prefill stage, similar to vLLM".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cluster.batching.base import Admission, BatchContext, Chunk
from cluster.batching.common import arrival_order, fill, whole_prompts
from cluster.requests import Request


class Fcfs:
    """Arrival order; a step prefills whole prompts or decodes everybody, never both."""

    def admit(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> Admission:
        """In arrival order while there is room."""
        return fill(waiting, running, context)

    def decode(
        self, ready: Sequence[Request], members: Collection[Request], context: BatchContext
    ) -> list[Request]:
        """Everybody."""
        return list(ready)

    def verify(
        self, drafted: Sequence[Request], prefilling: Sequence[Request], running: Collection[Request]
    ) -> list[Request]:
        """Nobody while a prompt is to be prefilled."""
        return [] if prefilling else list(drafted)

    def prefill(
        self,
        prefilling: Sequence[Request],
        verifying: Sequence[Request],
        num_rows: int,
        running: Collection[Request],
        context: BatchContext,
    ) -> list[Chunk]:
        """Whole prompts in arrival order."""
        return whole_prompts(sorted(prefilling, key=arrival_order), context.whole_tokens)
