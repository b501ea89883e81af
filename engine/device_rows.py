"""Rows of a forward whose tokens only the device knows, because it has just chosen them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from engine.devices import index_on
from engine.rectangles import HIDDEN
from engine.runner import ModelRunner, Segment

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """What stands in for `Segment.tokens` and `Segment.visible` of a batch; all of it on the runner's device.

    Of a segment's keys the first `committed` are visible to all its rows. Those after them are its columns.

    Attributes:
        tokens: int64 [rows], input token ids of the first of the segments' rows, concatenated; those of the
            others, if there are more rows, the segments have.
        committed: int64 [segments], at least 1 each; None without `seen`.
        seen: bool [segments, most rows, columns], which columns a row sees, itself among them, in the order
            of the keys; columns that a segment does not have are false. None if every row sees all keys,
            which takes one row per segment.
    """

    tokens: torch.Tensor
    committed: torch.Tensor | None = None
    seen: torch.Tensor | None = None

    def mask(self, rows: int, keys: int) -> torch.Tensor:
        """float32 [segments, 1, rows, keys], what to add to scores; a row of padding sees committed keys.

        A rectangle has no fewer `rows` and `keys` than any segment.
        """
        assert self.seen is not None
        assert self.committed is not None
        committed, seen = self.committed, self.seen[:, :rows]
        num_segments, most, columns = seen.shape
        column = torch.arange(keys, device=seen.device) - committed.unsqueeze(1)
        index = column.clamp(0, columns - 1).unsqueeze(1).expand(num_segments, most, keys)
        has_column = ((column >= 0) & (column < columns)).unsqueeze(1)
        visible = (column < 0).unsqueeze(1) | (seen.gather(2, index) & has_column)
        mask = torch.zeros(num_segments, rows, keys, device=seen.device)
        mask[:, :most].masked_fill_(~visible, float(HIDDEN))
        mask[:, most:].masked_fill_((column >= 0).unsqueeze(1), float(HIDDEN))
        return mask.unsqueeze(1)


@runtime_checkable
class DeviceRowsRunner(ModelRunner, Protocol):
    """A runner that can be given rows by the device that runs it."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    @property
    def takes_trees(self) -> bool:
        """Whether segments may have several rows, of which each sees columns of its own."""
        ...

    def forward_rows(
        self, segments: Sequence[Segment], rows: DeviceRows, keep: Int32 | None = None
    ) -> torch.Tensor:
        """Logits as of `forward`, without `keep` of all rows; it begins with those of `rows.tokens`.

        The host waits for nothing, unless the runner captures the shape now. Tokens of those rows, and if
        `rows` says what all see visibility, are not looked at in the segments.
        """
        ...


def all_rows(segments: Sequence[Segment]) -> Int32:
    """int32 [rows], `keep` for the logits of every row."""
    return np.arange(sum(len(segment.slots) for segment in segments), dtype=np.int32)


def tokens_of(segments: Sequence[Segment], rows: DeviceRows) -> torch.Tensor:
    """int64 [rows], input token ids of all rows: those that the device knows, and then the segments' own."""
    if len(rows.tokens) == sum([len(segment.slots) for segment in segments]):
        return rows.tokens
    known = np.concatenate([segment.tokens for segment in segments])[len(rows.tokens) :]
    return torch.cat([rows.tokens, index_on(known, rows.tokens.device)])
