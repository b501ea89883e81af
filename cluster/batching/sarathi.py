"""Stall-free batching: every decode is in every step, and prompts join in chunks under a token budget.

Sarathi-Serve (OSDI 2024), algorithm 3; the default of vLLM's V1 engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cluster.batching.base import Admission, BatchContext, Chunk
from cluster.batching.common import awaits_drafts, chunked, fill
from cluster.requests import Request


class Sarathi:
    """Decodes first, then chunks: of prompts begun, then of new ones, first come first served."""

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
        """Everybody."""
        return list(drafted)

    def prefill(
        self,
        prefilling: Sequence[Request],
        verifying: Sequence[Request],
        num_rows: int,
        running: Collection[Request],
        context: BatchContext,
    ) -> list[Chunk]:
        """Chunks in the order of admission, up to the budget of prompt tokens."""
        if awaits_drafts(verifying, running, context):
            return []
        return chunked(prefilling, context.chunk_tokens)
