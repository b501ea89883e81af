"""Indices and masks of a batch of decomposed segments: where keys, queries and partial results lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.decomposition import Decomposition, ragged_arange
from engine.rectangles import HIDDEN, key_counts
from engine.runner import Segment

Int64 = NDArray[np.int64]

# float16 has no room for `HIDDEN`, and minus infinity would make the logarithm of an empty sum 0.
_HIDDEN_HALF = np.float32(-3e4)


@dataclass(frozen=True, slots=True, eq=False)
class HeadIndices:
    """Indices that depend on how many heads there are, for rows of one head each.

    Attributes:
        ask: int64 [rows * kv_heads * queries * shared], row of the batch's [batch rows * heads] queries.
        partial: int64 [most * merged], for each merged row the partial results it is made of; columns
            beyond a row's own count repeat its first.
        weight: int64 [n], places of the real ones in `partial`, by merged row.
        result: int64 [n], `partial` at those places.
        first: int64 [merged], where each merged row begins in `weight` and `result`.
    """

    ask: torch.Tensor
    partial: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor
    first: torch.Tensor


@dataclass(slots=True, eq=False)
class Pieces:
    """Segments cut into the pieces of one rectangle of rows.

    Attributes:
        rows, queries, keys: rows of the rectangle, and query rows and keys in each of them.
        read: int64 [rows * keys], slots of the keys; for padding, of a segment in the same row.
        mask: float [rows, 1, queries, keys] to add to the scores, finite; None if there is nothing to hide.
        hidden: float32 [most, merged, 1], to add to the logarithms: minus infinity where `partial` is a
            repetition; None if it never is.
        target: int64 [merged], batch row of each merged row; None if they are the batch's rows, in order.
        num_merged: batch rows of these segments.
    """

    rows: int
    queries: int
    keys: int
    read: torch.Tensor
    mask: torch.Tensor | None
    hidden: torch.Tensor | None
    target: torch.Tensor | None
    num_merged: int
    _ask: Int64
    _partial: Int64
    _is_real: NDArray[np.bool_]
    _indices: dict[tuple[int, int], HeadIndices] = field(default_factory=dict)
    _folded: dict[int, torch.Tensor] = field(default_factory=dict)

    def indices(self, kv_heads: int, shared: int) -> HeadIndices:
        """Indices for `kv_heads` key heads, each shared by `shared` query heads."""
        if (kv_heads, shared) not in self._indices:
            self._indices[kv_heads, shared] = self._index(kv_heads, shared)
        return self._indices[kv_heads, shared]

    def folded_mask(self, shared: int) -> torch.Tensor | None:
        """The mask with its rows repeated for the query heads that share a key head."""
        if self.mask is None or shared == 1:
            return self.mask
        if shared not in self._folded:
            self._folded[shared] = self.mask.repeat_interleave(shared, dim=2)
        return self._folded[shared]

    def _index(self, kv_heads: int, shared: int) -> HeadIndices:
        # The kernel's rows are, from the outermost: row of the rectangle, key head, query row, and the query
        # heads that share the key head. Merged rows are: batch row, query head.
        key_head = np.arange(kv_heads)[:, None, None]
        ask = self._ask[:, None, :, None] * (kv_heads * shared) + key_head * shared + np.arange(shared)
        row, query = np.divmod(self._partial, self.queries)
        row, query = row[:, :, None, None], query[:, :, None, None]
        partial = ((row * kv_heads + np.arange(kv_heads)[:, None]) * self.queries + query) * shared
        partial = (partial + np.arange(shared)).reshape(len(partial), -1)
        is_real = np.repeat(self._is_real, kv_heads * shared, axis=1)
        merged, column = np.nonzero(is_real.T)
        counts = is_real.sum(axis=0)
        device = self.read.device
        return HeadIndices(
            ask=torch.from_numpy(ask.reshape(-1)).to(device),
            partial=torch.from_numpy(partial.reshape(-1)).to(device),
            weight=torch.from_numpy(column * partial.shape[1] + merged).to(device),
            result=torch.from_numpy(partial[column, merged]).to(device),
            first=torch.from_numpy(np.cumsum(counts) - counts).to(device),
        )


def lay_out(
    segments: Sequence[Segment],
    starts: Sequence[int],
    num_batch_rows: int,
    cut: Decomposition,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Pieces:
    """Everything that attention over the pieces of `cut` needs.

    Args:
        segments: the segments that were cut.
        starts: the first batch row of each.
        num_batch_rows: rows of the whole batch.
        cut: the plan over their keys; at most two pieces to a row.
        dtype: of the mask.
        device: where all is needed.
    """
    row_counts = np.array([len(segment.slots) for segment in segments])
    batch_starts = np.array(starts)
    num_rows, keys = cut.num_rows, cut.row_length
    # Query rows: those of a piece's segment, beside those of the piece that lies before it in the row.
    is_second = cut.offset > 0
    most = int(row_counts.max())
    queries = most * 2 if is_second.any() else most
    first_piece = np.zeros(num_rows, dtype=np.int64)
    first_piece[cut.row[~is_second]] = np.flatnonzero(~is_second)
    asker = np.repeat(cut.segment[first_piece][:, None], queries, axis=1)
    asker[cut.row[is_second], most:] = cut.segment[is_second][:, None]
    place = np.minimum(np.arange(queries) % most, row_counts[asker] - 1)

    # Keys: which one each cell of the rectangle holds; padding repeats the row's first.
    order = ragged_arange(cut.length)
    cells = np.repeat(cut.row * keys + cut.offset, cut.length) + order
    owner = np.full(num_rows * keys, -1)
    owner[cells] = np.repeat(cut.segment, cut.length)
    position = np.zeros(num_rows * keys, dtype=np.int64)
    position[cells] = np.repeat(cut.start, cut.length) + order
    totals = np.array(key_counts(segments))
    key_starts = np.cumsum(totals) - totals
    slots = np.concatenate([part for segment in segments for part in (segment.past, segment.slots)])
    first_keys = slots[key_starts[cut.segment[first_piece]] + cut.start[first_piece]]
    read = np.repeat(first_keys.astype(np.int64), keys)
    read[cells] = slots[key_starts[owner[cells]] + position[cells]]

    # Partial results: of every batch row, one from each piece of its segment.
    num_pieces = np.bincount(cut.segment, minlength=len(segments))
    first_of_segment = np.cumsum(num_pieces) - num_pieces
    segment_of_row = np.repeat(np.arange(len(segments)), row_counts)
    counts = num_pieces[segment_of_row]
    column = np.arange(int(counts.max()))[:, None]
    is_real = column < counts
    piece = first_of_segment[segment_of_row] + np.where(is_real, column, 0)
    partial = cut.row[piece] * queries + ragged_arange(row_counts) + np.where(is_second[piece], most, 0)
    batch_rows = np.repeat(batch_starts, row_counts) + ragged_arange(row_counts)
    is_batch = len(batch_rows) == num_batch_rows and bool((np.diff(batch_rows) == 1).all())

    seen = _seen(segments, cut, owner.reshape(num_rows, keys), position.reshape(num_rows, keys), asker, place)
    mask = hidden = None
    if not seen.all():
        lowest = _HIDDEN_HALF if dtype == torch.float16 else HIDDEN
        mask = torch.from_numpy(np.where(seen, np.float32(0), lowest)).unsqueeze(1).to(device, dtype)
    if not is_real.all():
        hidden = torch.from_numpy(np.where(is_real, np.float32(0), np.float32(-np.inf))[:, :, None])
        hidden = hidden.to(device)
    return Pieces(
        rows=num_rows,
        queries=queries,
        keys=keys,
        read=torch.from_numpy(read).to(device),
        mask=mask,
        hidden=hidden,
        target=None if is_batch else torch.from_numpy(batch_rows).to(device),
        num_merged=len(batch_rows),
        _ask=batch_starts[asker] + place,
        _partial=partial,
        _is_real=is_real,
    )


def _seen(
    segments: Sequence[Segment],
    cut: Decomposition,
    owner: Int64,
    position: Int64,
    asker: Int64,
    place: Int64,
) -> NDArray[np.bool_]:
    """bool [rows, queries, keys], which keys of its row each query row attends to.

    Args:
        segments: the segments.
        cut: their pieces.
        owner: int64 [rows, keys], whose key each is; -1 for padding.
        position: int64 [rows, keys], its index among its segment's keys.
        asker: int64 [rows, queries], the segment of each query row.
        place: int64 [rows, queries], its index among its segment's rows.
    """
    past = np.array([len(segment.past) for segment in segments])
    totals = np.array(key_counts(segments))
    is_tree = np.array([segment.visible is not None for segment in segments])
    limit = np.where(is_tree[asker], totals[asker], past[asker] + 1 + place)
    seen: NDArray[np.bool_] = position[:, None] < limit[:, :, None]
    seen &= owner[:, None] == asker[:, :, None]
    # Of a tree's last keys, each node has its own set.
    most = max(len(segment.slots) for segment in segments)
    recent = np.array([0 if s.visible is None else s.visible.shape[1] for s in segments])
    window = totals - recent
    begin = np.maximum(cut.start, window[cut.segment])
    end = cut.start + cut.length
    for piece in np.flatnonzero(is_tree[cut.segment] & (begin < end)):
        index = cut.segment[piece]
        visible = segments[index].visible
        assert visible is not None
        part = visible[:, begin[piece] - window[index] : end[piece] - window[index]]
        query = most if cut.offset[piece] else 0
        column = int(cut.offset[piece] + begin[piece] - cut.start[piece])
        seen[cut.row[piece], query : query + len(part), column : column + part.shape[1]] = part
    return seen
