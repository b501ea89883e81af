"""One attention with every way of padding, so that all are measured on the same stored keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention import CHUNK_BYTES, PaddedAttention, PaddedPlan
from engine.decomposed_attention import COST, SHORTEST_ROW, DecomposedAttention
from engine.decomposition import Decomposition, cheapest, split_rows, stitch
from engine.rectangles import partition
from engine.runner import Segment

METHODS = ("one rectangle", "rectangle in chunks", "grouped", "decomposed", "stitched", "auto")
"""One rectangle for the batch, as in SPIN's figure, and the same gathered some megabytes at a time; what
`target.attention` can be; and pieces of two requests in a row."""

_ALL_AT_ONCE = 1 << 62


class SwitchedAttention(DecomposedAttention):
    """`DecomposedAttention` whose way of padding is changed between forwards.

    Attributes:
        method: one of METHODS.
        row_length: keys in a row of the decomposition, instead of the best number of them; 0 for the best.
    """

    method = METHODS[0]
    row_length = 0

    def fill(self, generator: torch.Generator) -> None:
        """Random keys and values in all slots of all layers."""
        for layer in self._layers.values():
            layer.normal_(generator=generator)

    def partition(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Indices of the segments of each group."""
        return [list(range(len(segments)))] if self.method in METHODS[:2] else partition(segments)

    def plan(self, segments: Sequence[Segment]) -> PaddedPlan:
        """See `AttentionBackend`."""
        # SPIN's baseline gathers all of it first.
        self.chunk_bytes = _ALL_AT_ONCE if self.method == METHODS[0] else CHUNK_BYTES
        self._when_cheaper = self.method == "auto"
        if self.method in METHODS[:3]:
            return PaddedAttention.plan(self, segments)
        return super().plan(segments)

    def _cut(
        self, segments: Sequence[Segment], members: list[int], rectangles: list[list[int]], counts: list[int]
    ) -> Decomposition | None:
        lengths = [counts[index] for index in members]
        if self.row_length:
            return split_rows(lengths, self.row_length)
        if self.method == "stitched":
            return stitch(lengths, len(lengths))
        if self.method == "decomposed":
            return cheapest(lengths, max(len(s.slots) for s in segments), COST, SHORTEST_ROW)[0]
        return super()._cut(segments, members, rectangles, counts)
