"""What FlashInfer's paged kernels want to know of a batch: index arrays and masks, in numpy.

A page here is one slot, so that a request's pages are its slots in order, and shared prefixes need no
alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.runner import Segment

Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayout:
    """Requests of one kernel call, in order.

    Attributes:
        qo_indptr: int32 [requests + 1], first query row of each request, then their number.
        kv_indptr: int32 [requests + 1], first of `kv_indices` of each, then their number.
        kv_indices: int32 [keys], slots of each request's keys in order.
        last_page_len: int32 [requests], slots used of the last page: 1.
        mask: bool [sum over requests of rows * keys], row by row, request by request, whether the row sees
            the key; None where causal masking, aligned at the last key, says the same.
    """

    qo_indptr: Int32
    kv_indptr: Int32
    kv_indices: Int32
    last_page_len: Int32
    mask: Bool | None


def paged_layout(
    segments: Sequence[Segment], rows: int | None = None, *, masked: bool = False
) -> PagedLayout:
    """Lay out a batch.

    Args:
        segments: at least one.
        rows: query rows of every request, no fewer than its segment's: the others are padding, see the first
            key, and their results mean nothing. None for as many as the segment has.
        masked: give a mask where causal masking would do, too.
    """
    counts = np.array([len(segment.slots) for segment in segments], dtype=np.int32)
    queries = counts if rows is None else np.full(len(segments), rows, dtype=np.int32)
    keys = np.array([len(s.past) + len(s.slots) for s in segments], dtype=np.int32)
    causal = bool((queries == counts).all()) and all(segment.visible is None for segment in segments)
    mask = None
    if masked or not causal:
        mask = np.concatenate([_mask(s, int(n)).reshape(-1) for s, n in zip(segments, queries, strict=True)])
    return PagedLayout(
        qo_indptr=_offsets(queries),
        kv_indptr=_offsets(keys),
        kv_indices=np.concatenate([part for s in segments for part in (s.past, s.slots)]).astype(np.int32),
        last_page_len=np.ones(len(segments), dtype=np.int32),
        mask=mask,
    )


def _offsets(lengths: Int32) -> Int32:
    return np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(lengths, dtype=np.int32)])


def _mask(segment: Segment, rows: int) -> Bool:
    """bool [rows, keys] of one segment."""
    own, keys = len(segment.slots), len(segment.past) + len(segment.slots)
    mask = np.zeros((rows, keys), dtype=np.bool_)
    mask[own:, 0] = True
    if segment.visible is None:
        mask[:own] = np.arange(keys) <= np.arange(keys - own, keys)[:, None]
        return mask
    recent = segment.visible.shape[1]
    mask[:own, : keys - recent] = True
    mask[:own, keys - recent :] = segment.visible
    return mask


def without_mask(segment: Segment) -> Segment:
    """A segment of one row as a causal one, with only the keys that the row sees; others as they are.

    A row sees itself, so that its own key stays the last one.
    """
    if segment.visible is None or len(segment.slots) > 1:
        return segment
    recent = segment.visible.shape[1] - 1
    past = segment.past
    if recent and not segment.visible.all():
        is_seen = np.ones(len(past), dtype=np.bool_)
        is_seen[len(past) - recent :] = segment.visible[0, :recent]
        past = past[is_seen]
    return Segment(segment.tokens, segment.positions, segment.slots, past)


def split_by_mask(segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """Indices of the segments that causal masking serves, and of those that need a mask of their own."""
    causal: list[int] = []
    masked: list[int] = []
    for index, segment in enumerate(segments):
        (causal if segment.visible is None else masked).append(index)
    return causal, masked
