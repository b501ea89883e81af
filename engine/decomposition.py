"""Request decomposition: long sequences are cut so that they fill rows which short ones would be padded to.

SPIN, section V-A. Pure planning over key lengths; `engine.decomposed_attention` executes the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Decomposition:
    """How the keys of several segments lie in a rectangle of `num_rows` rows of `row_length` keys.

    The pieces are ordered by segment, and by place in the segment. Every key is in one piece.

    Attributes:
        row_length: keys in a row, padding included.
        num_rows: rows.
        segment: int64 [pieces], the segment a piece belongs to.
        start: int64 [pieces], index of the piece's first key among its segment's keys.
        length: int64 [pieces], its keys, at least 1.
        row: int64 [pieces], where it lies.
        offset: int64 [pieces], the column of its first key.
    """

    row_length: int
    num_rows: int
    segment: Int64
    start: Int64
    length: Int64
    row: Int64
    offset: Int64

    @property
    def padding(self) -> int:
        """Keys of the rectangle that belong to nobody."""
        return self.row_length * self.num_rows - int(self.length.sum())

    @property
    def is_split(self) -> bool:
        """Whether any segment has more than one piece."""
        return bool((self.start > 0).any())


def rectangle_padding(lengths: Sequence[int]) -> int:
    """Padding of one rectangle with a row for each segment: the batch without decomposition."""
    return len(lengths) * max(lengths) - sum(lengths)


def decompose(lengths: Sequence[int], num_rows: int) -> Decomposition:
    """Cut segments into pieces of one row each, with the row length that has the fewest keys of padding.

    SPIN's search: with at most `num_rows` rows, which bounds the copies of queries, and no two segments in
    one row, so that no row has more queries than its segment. The padding is no monotonic function of the
    row length; only lengths at which some segment fills its last row can be best, and all of these are tried.
    Of equal paddings the one with the fewest rows is taken.

    Args:
        lengths: keys of each segment, each at least 1.
        num_rows: most rows, at least one for each segment.

    Raises:
        ValueError: if there is no segment, an empty one, or fewer rows than segments.
    """
    sizes = _checked(lengths, num_rows)
    candidates, rows = _candidates(sizes, num_rows)
    padding = candidates * rows - int(sizes.sum())
    best = int(np.lexsort((rows, padding))[0])
    return split_rows(lengths, int(candidates[best]))


def split_rows(lengths: Sequence[int], row_length: int) -> Decomposition:
    """Every segment cut after each `row_length` keys, a row for each piece, those of a segment adjacent."""
    sizes = np.asarray(lengths, dtype=np.int64)
    pieces = -(-sizes // row_length)
    segment = np.repeat(np.arange(len(sizes)), pieces)
    start = ragged_arange(pieces) * row_length
    return Decomposition(
        row_length=row_length,
        num_rows=len(segment),
        segment=segment,
        start=start,
        length=np.minimum(sizes[segment] - start, row_length),
        row=np.arange(len(segment)),
        offset=np.zeros(len(segment), dtype=np.int64),
    )


def stitch(lengths: Sequence[int], num_rows: int) -> Decomposition:
    """Cut segments into pieces that fill at most `num_rows` rows, at most two pieces to a row.

    Rows as short as that number of rows can have, so less than one key of padding for each. A row holds
    the end of a short segment and, beside it, a piece of a long one: how Walker's alias method distributes
    probabilities over cells of one size. As each row then has the queries of two segments, its scores
    cost twice as much; `decompose` avoids that.

    Args:
        lengths: keys of each segment, each at least 1.
        num_rows: most rows, at least one for each segment.

    Raises:
        ValueError: as `decompose`.
    """
    sizes = _checked(lengths, num_rows)
    row_length = -(-int(sizes.sum()) // num_rows)
    longest = int(sizes.max())
    if longest * len(lengths) <= row_length * num_rows:
        return split_rows(lengths, longest)  # nothing to gain
    rest = [int(size) for size in sizes]
    taken = [0] * len(rest)
    short = [index for index, size in enumerate(rest) if size < row_length]
    long = [index for index, size in enumerate(rest) if size >= row_length]
    pieces: list[tuple[int, int, int, int, int]] = []

    def place(index: int, length: int, row: int, offset: int) -> None:
        pieces.append((index, taken[index], length, row, offset))
        taken[index] += length
        rest[index] -= length

    row = 0
    while short or long:
        used = 0
        if short:
            index = short.pop()
            used = rest[index]
            place(index, used, row, 0)
        if long:
            index = long[-1]
            place(index, row_length - used, row, used)
            if rest[index] < row_length:
                long.pop()
                if rest[index]:
                    short.append(index)
        row += 1
    columns = np.array(sorted(pieces), dtype=np.int64).T
    return Decomposition(row_length, row, *columns)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """What attention over padded keys costs, in units of one key's score for one query row, over all heads.

    Attributes:
        gather: of gathering a key and its value.
        group: of a further rectangle: launching its operations.
        merge: of weighing and adding one query row's partial result.
        merging: of merging at all, in one rectangle.
    """

    gather: float
    group: float
    merge: float
    merging: float

    def rectangle(self, num_rows: int, queries: int, row_length: int) -> float:
        """Of a rectangle of `num_rows` rows, each with `queries` query rows and `row_length` keys."""
        return self.group + num_rows * row_length * (queries + self.gather)

    def pieces(self, num_rows: int, queries: int, num_keys: int) -> float:
        """Of a rectangle of `num_keys` keys in `num_rows` rows whose results are merged."""
        return self.rectangle(1, queries, num_keys) + self.merging + num_rows * queries * self.merge


def cheapest(
    lengths: Sequence[int], queries: int, cost: AttentionCost, shortest_row: int
) -> tuple[Decomposition, float]:
    """The row length of least cost, and that cost: SPIN's search with the number of rows chosen as well.

    More rows have less padding, and more partial results to merge.

    Args:
        lengths: keys of each segment, each at least 1.
        queries: query rows of each segment, padding included.
        cost: the costs.
        shortest_row: no row is shorter than this, or the longest segment.

    Raises:
        ValueError: if there is no segment, or an empty one.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    num_rows = max(len(lengths), int((-(-sizes // shortest_row)).sum()))
    sizes = _checked(lengths, num_rows)
    candidates, rows = _candidates(sizes, num_rows)
    merging = cost.merging + rows * (queries * cost.merge)
    costs = cost.group + candidates * rows * (queries + cost.gather)
    costs = costs + np.where(candidates < sizes.max(), merging, 0.0)
    best = int(costs.argmin())
    return split_rows(lengths, int(candidates[best])), float(costs[best])


def _checked(lengths: Sequence[int], num_rows: int) -> Int64:
    if len(lengths) == 0 or min(lengths) < 1:
        raise ValueError("every segment needs at least one key, and there must be one")
    if num_rows < len(lengths):
        raise ValueError(f"{num_rows} rows are too few for {len(lengths)} segments")
    return np.asarray(lengths, dtype=np.int64)


def _candidates(sizes: Int64, num_rows: int) -> tuple[Int64, Int64]:
    """Row lengths that need at most `num_rows` rows, and how many rows each needs.

    Between two lengths at which a number of pieces changes, the shorter row is the better one; so only
    the shortest row that gives some segment some number of pieces can be best.
    """
    # No segment can have more rows than the others leave over.
    most = num_rows - len(sizes) + 1
    shortest = -(-int(sizes.sum()) // num_rows)
    divisors = np.minimum(most, -(-sizes // shortest))
    candidates = np.unique(-(-np.repeat(sizes, divisors) // (ragged_arange(divisors) + 1)))
    rows = (-(-sizes // candidates[:, None])).sum(axis=1)
    fits = rows <= num_rows
    return candidates[fits], rows[fits]


def ragged_arange(counts: Int64) -> Int64:
    """0 .. counts[0] - 1, 0 .. counts[1] - 1, ... in one array."""
    ends = np.cumsum(counts)
    ragged: Int64 = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    return ragged
