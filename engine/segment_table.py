"""What attention kernels in Triton are told of a batch: where each request's rows, keys and masks begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.runner import Segment

Int32 = NDArray[np.int32]

#: Numbers that describe a segment to the kernels.
FIELDS = 7


@dataclass(slots=True, eq=False)
class SegmentTable:
    """What the kernels know of a batch.

    Attributes:
        segments: int32 [segments, FIELDS]: first batch row, rows, first of `slots`, keys, keys all rows see,
            first of `seen` or -1 where rows are causal, and columns of `seen`. First rows ascend, also
            where segments have none.
        slots: int32 [keys], slots of each segment's keys in order.
        seen: uint8, per segment [rows, columns], whether a row sees a key behind those that all see.
    """

    segments: torch.Tensor
    slots: torch.Tensor
    seen: torch.Tensor


class Description(NamedTuple):
    """`SegmentTable` of a batch, on the host.

    Attributes:
        table: int32 [segments * FIELDS].
        slots: those of the keys, in parts.
        num_keys: in all parts.
        seen: uint8.
    """

    table: Int32
    slots: list[Int32]
    num_keys: int
    seen: NDArray[np.uint8]

    def write(self, into: Int32, first_slot: int) -> None:
        """Write the table to the beginning of an array, and the slots from `first_slot` on."""
        into[: len(self.table)] = self.table
        np.concatenate(self.slots, out=into[first_slot : first_slot + self.num_keys])


def described(segments: Sequence[Segment]) -> Description:
    """What the kernels are to know of a batch."""
    table: list[int] = []
    slots: list[Int32] = []
    seen = []
    row = key = bit = 0
    for segment in segments:
        rows = len(segment.slots)
        keys = len(segment.past) + rows
        if segment.visible is None:
            table += (row, rows, key, keys, keys - rows, -1, 0)
        else:
            columns = segment.visible.shape[1]
            table += (row, rows, key, keys, keys - columns, bit, columns)
            seen.append(segment.visible.reshape(-1).view(np.uint8))
            bit += rows * columns
        slots += (segment.past, segment.slots)
        row, key = row + rows, key + keys
    return Description(
        np.array(table, dtype=np.int32),
        slots,
        key,
        np.concatenate(seen) if seen else np.zeros(0, dtype=np.uint8),
    )
