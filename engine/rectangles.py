"""Ragged segments as rectangles of padded queries and keys: which go together, slots of keys, and masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.runner import Segment

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

HIDDEN = np.float32(-1e30)
"""Added to the score of an invisible key: finite, so that a row of padding cannot become NaN."""

# Relative costs that decide the grouping of segments, in units of one score of one query row over all
# heads: gathering a key and its value costs about as much as two scores, a further group as 400.
GATHER_COST = 2
GROUP_COST = 400


def first_rows(segments: Sequence[Segment]) -> list[int]:
    """Batch row of each segment's first row, then the number of rows of the batch."""
    starts = [0]
    for segment in segments:
        starts.append(starts[-1] + len(segment.slots))
    return starts


def key_counts(segments: Sequence[Segment]) -> list[int]:
    """Keys of each segment: those of earlier tokens, and its own."""
    return [len(segment.past) + len(segment.slots) for segment in segments]


def partition(segments: Sequence[Segment]) -> list[list[int]]:
    """Indices of the segments of each group, ascending within a group."""
    shapes = [(len(segment.slots), len(segment.past) + len(segment.slots)) for segment in segments]
    if len(shapes) == 1:
        return [[0]]
    order = sorted(range(len(shapes)), key=shapes.__getitem__, reverse=True)
    groups: list[list[int]] = []
    rows = keys = 0
    for index in order:
        q, k = shapes[index]
        if groups:
            members = groups[-1]
            apart = len(members) * keys * (rows + GATHER_COST) + k * (q + GATHER_COST) + GROUP_COST
            wide = max(keys, k)
            if (len(members) + 1) * wide * (rows + GATHER_COST) <= apart:
                members.append(index)
                keys = wide
                continue
        groups.append([index])
        rows, keys = q, k
    return [sorted(members) for members in groups]


def rectangle(segments: Sequence[Segment], rows: int, keys: int) -> tuple[Int64, Float32 | None]:
    """Segments as one rectangle of `rows` queries and `keys` keys each, no fewer than any of them has.

    Returns:
        int64 [segments, keys], slots of the keys, for padding one of the segment's own; and float32
        [segments, rows, keys], what to add to scores, None if every key is visible to every row. A row of
        padding sees some key of its segment.
    """
    counts = [len(segment.slots) for segment in segments]
    return key_slots(segments, keys), _mask(segments, counts, key_counts(segments), rows, keys)


def key_slots(segments: Sequence[Segment], keys: int) -> Int64:
    """int64 [segments, keys], slots of each segment's keys, for padding one of its own."""
    read = np.empty((len(segments), keys), dtype=np.int64)
    for line, segment in zip(read, segments, strict=True):
        past = len(segment.past)
        total = past + len(segment.slots)
        line[:past] = segment.past
        line[past:total] = segment.slots
        line[total:] = segment.slots[0]
    return read


def _mask(
    segments: Sequence[Segment], row_counts: list[int], totals: list[int], rows: int, keys: int
) -> Float32 | None:
    """float32 [segments, rows, keys], what to add to scores; None if every key is visible to every row."""
    sees_all = all(segment.visible is None and segment.unseen is None for segment in segments)
    if rows == 1 and min(totals) == keys and sees_all:
        return None
    limits = (np.array(totals) - np.array(row_counts))[:, None] + np.arange(1, rows + 1)
    mask = np.where(np.arange(keys) < limits[:, :, None], np.float32(0), HIDDEN)
    for line, segment, total in zip(mask, segments, totals, strict=True):
        if segment.visible is not None:
            n, recent = segment.visible.shape
            line[:n, total - recent : total] = np.where(segment.visible, np.float32(0), HIDDEN)
        if segment.unseen is not None:
            most = int(segment.unseen.max())
            hidden = np.arange(most) < segment.unseen[:, None]
            line[: len(hidden), :most][hidden] = HIDDEN
    return mask
