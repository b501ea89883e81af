"""Batches brought to a fixed shape, so that one captured forward serves many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.runner import Segment

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

#: Most keys of a request that are rounded up to a multiple of `KEY_STEP`; beyond, to an eighth of an octave.
_FINE_KEYS, KEY_STEP = 2048, 256


#: Rows of a request in a tree, at most: one with more is reading a prompt. Where requests need not have as
#: many rows as others, prompts are in captured forwards of up to so many rows in all: larger ones have enough
#: work per launch.
MOST_TREE_ROWS, MOST_PROMPT_ROWS = 64, 256
#: Rows that a batch may be padded by where its own shape is not captured, fewer than a GPU multiplies while
#: it reads the weights; and how many times its keys it may read.
MOST_ROWS_PADDED, MOST_KEYS_PADDED = 32, 1.25


class Shape(NamedTuple):
    """Of a captured forward.

    Attributes:
        requests: of the batch, padding included.
        rows: query rows that each request may have.
        keys: of each request; 0 where they do not matter.
        tokens: rows of the whole batch where requests have as many as they need (a token budget); 0 where
            each has `rows`.
        is_adapted: whether rows may have adapters.
    """

    requests: int
    rows: int
    keys: int
    tokens: int = 0
    is_adapted: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the batch, padding included."""
        return self.tokens or self.requests * self.rows

    def serves(self, other: Any) -> bool:
        """Whether batches of another shape may be padded to this one: it holds them, and not much more."""
        assert isinstance(other, Shape)
        holds = (
            self.requests >= other.requests and self.rows >= other.rows and self.num_rows >= other.num_rows
        )
        keys, others = self.requests * self.keys, other.requests * other.keys
        is_near = self.num_rows <= other.num_rows + MOST_ROWS_PADDED and keys <= MOST_KEYS_PADDED * others
        return holds and self.keys >= other.keys and is_near and self.is_adapted == other.is_adapted


def power_of_two(number: int) -> int:
    """The next one."""
    return 1 << (number - 1).bit_length()


def rounded(number: int) -> int:
    """The next of 1, 2, 4, 8, then multiples of 8 up to 64, then of 32."""
    if number <= 8:
        return power_of_two(number)
    step = 8 if number <= 64 else 32
    return -(-number // step) * step


def rounded_keys(number: int) -> int:
    """The next multiple of 256 up to 2048, from there on of an eighth of the power of two below."""
    step = KEY_STEP
    if number > _FINE_KEYS:
        step = max(KEY_STEP, (1 << ((number - 1).bit_length() - 1)) // 8)
    return -(-number // step) * step


def shape_of(segments: Sequence[Segment], *, with_keys: bool, is_rectangle: bool = True) -> Shape:
    """The smallest shape that holds a batch, `is_rectangle` if requests have equally many rows in it.

    Where they have not, requests and rows of nobody cost next to nothing, and are rounded up generously: any
    prompt has as many rows as another.
    """
    counts = [len(segment.slots) for segment in segments]
    keys = max(len(segment.past) + len(segment.slots) for segment in segments)
    padded_keys = rounded_keys(keys) if with_keys else 0
    is_adapted = any(segment.adapter for segment in segments)
    if is_rectangle:
        return Shape(rounded(len(segments)), rounded(max(counts)), padded_keys, is_adapted=is_adapted)
    most = max(counts)
    rows = power_of_two(most) if most <= MOST_TREE_ROWS else max(most, MOST_PROMPT_ROWS)
    return Shape(power_of_two(len(segments)), rows, padded_keys, rounded(sum(counts)), is_adapted)


@dataclass(frozen=True, slots=True, eq=False)
class PaddedRows:
    """Inputs of a forward of `Shape`, request by request; with padding after each, or after all.

    Attributes:
        tokens, positions: int64 [rows]; 0 for padding.
        write: int64 [rows], slots; the scratch slot for padding.
        batch_rows: int64 [rows of the batch], where each real row went.
    """

    tokens: Int64
    positions: Int64
    write: Int64
    batch_rows: Int64


def pad_rows(segments: Sequence[Segment], shape: Shape, scratch: int) -> PaddedRows:
    """Lay out a batch in a shape that holds it; `scratch` is a slot that nobody reads."""
    if shape.tokens:
        return _pad_end(segments, shape, scratch)
    tokens = np.zeros((shape.requests, shape.rows), dtype=np.int64)
    positions = np.zeros_like(tokens)
    write = np.full_like(tokens, scratch)
    for index, segment in enumerate(segments):
        n = len(segment.slots)
        tokens[index, :n], positions[index, :n] = segment.tokens, segment.positions
        write[index, :n] = segment.slots
    counts = np.array([len(segment.slots) for segment in segments])
    real = np.arange(shape.rows) < counts[:, None]
    return PaddedRows(
        tokens.reshape(-1), positions.reshape(-1), write.reshape(-1), np.flatnonzero(real).astype(np.int64)
    )


def _pad_end(segments: Sequence[Segment], shape: Shape, scratch: int) -> PaddedRows:
    total = sum(len(segment.slots) for segment in segments)
    tokens = np.zeros(shape.tokens, dtype=np.int64)
    positions, write = np.zeros_like(tokens), np.full_like(tokens, scratch)
    for values, parts in (
        (tokens, [segment.tokens for segment in segments]),
        (positions, [segment.positions for segment in segments]),
        (write, [segment.slots for segment in segments]),
    ):
        np.concatenate(parts, out=values[:total])
    return PaddedRows(tokens, positions, write, np.arange(total, dtype=np.int64))


def filler(scratch: int) -> Segment:
    """A request of nobody's: one row that sees itself, in the scratch slot."""
    zero = np.zeros(1, dtype=np.int32)
    return Segment(tokens=zero, positions=zero, slots=zero + np.int32(scratch), past=zero[:0])


def filled(segments: Sequence[Segment], shape: Shape, scratch: int) -> list[Segment]:
    """The batch with as many requests as the shape has."""
    return [*segments, *[filler(scratch)] * (shape.requests - len(segments))]
