"""Attention of forwards of a fixed shape: plans whose tensors stay where they are and are filled anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from engine.attention import Group, PaddedAttention, PaddedPlan
from engine.device_rows import DeviceRows
from engine.devices import overwrite, staging
from engine.flashinfer_attention import FlashInferAttention, FlashInferPlan, Part
from engine.padded_segments import MOST_TREE_ROWS, Shape, filled
from engine.paged_layout import paged_layout, without_mask
from engine.rectangles import key_counts, key_slots, rectangle
from engine.runner import KeyTokens, Segment
from engine.segment_table import FIELDS, SegmentTable, described
from engine.triton_attention import TritonAttention, TritonPlan

#: Keys of a tree's mask, at most, in a fixed shape: the rows of many layers, none of them committed.
MOST_COLUMNS = 512
#: How often a slot may be read by a batch of fixed shape, on average over the pool: shared prefixes are read
#: by each request that has them, but room for `max_tokens` keys of every request would be gigabytes.
MOST_READS = 2


class StaticAttention(Protocol):
    """One shape's plan, and how to fill it."""

    @property
    def plan(self) -> PaddedPlan:
        """What layers attend by; its tensors never move."""
        ...

    def fill(self, segments: Sequence[Segment], rows: DeviceRows | None = None) -> KeyTokens:
        """Describe a batch that the shape holds; what attention will read for it.

        `rows` has its masks, if the device made them.
        """
        ...


class PaddedStatic:
    """Of `PaddedAttention`: one rectangle of requests, with as many rows and keys as the shape has."""

    def __init__(self, shape: Shape, scratch: int, write: torch.Tensor, dtype: torch.dtype) -> None:
        """Plan tensors where `write` is, the mask as `dtype`; `scratch` is a slot that no request holds."""
        device = write.device
        self._shape, self._scratch = shape, scratch
        mask = torch.zeros(shape.requests, 1, shape.rows, shape.keys, dtype=dtype, device=device)
        self._group = Group(
            segments=shape.requests,
            rows=shape.rows,
            keys=shape.keys,
            read=torch.zeros(shape.requests * shape.keys, dtype=torch.int64, device=device),
            first_slot=-1,
            mask=mask,
            gather=None,
            keep=None,
            target=None,
            span=slice(0, shape.num_rows),
        )
        self._mask = mask
        self.plan = PaddedPlan(shape.num_rows, write, [self._group], KeyTokens(0, 0))

    def fill(self, segments: Sequence[Segment], rows: DeviceRows | None = None) -> KeyTokens:
        """See `StaticAttention`."""
        shape = self._shape
        everybody = filled(segments, shape, self._scratch)
        if rows is not None and rows.seen is not None:
            read = key_slots(everybody, shape.keys)
            self._mask.fill_(-math.inf)
            self._mask[..., 0].zero_()  # requests of nobody see themselves
            self._mask[: len(segments)] = rows.mask(shape.rows, shape.keys)
        else:
            read, mask = rectangle(everybody, shape.rows, shape.keys)
            if mask is None:
                self._mask.zero_()
            else:
                overwrite(self._mask, mask)
        overwrite(self._group.read, read)
        # What was derived from the mask is of the last batch; a captured forward derives it anew itself.
        self._group.folded.clear()
        real = sum(key_counts(segments))
        return KeyTokens(real, shape.requests * shape.keys - real)


class FlashInferStatic:
    """Of `FlashInferAttention`: a wrapper with buffers of its own; keys need no rounding."""

    def __init__(
        self,
        attention: FlashInferAttention,
        shape: Shape,
        scratch: int,
        write: torch.Tensor,
        *,
        q_heads: int,
        scale: float,
        max_tokens: int,
    ) -> None:
        """A wrapper for `shape`, causal if it has one row per request; `max_tokens` bounds every context."""
        self._attention, self._shape, self._scratch = attention, shape, scratch
        self._q_heads, self._scale = q_heads, scale
        # Requests of nobody have a key each.
        keys = most_keys(shape, max_tokens, attention.num_slots) + shape.requests
        mask_bytes = 0
        if shape.rows > 1:  # a bit per row and key, the last byte of each request its own
            mask_bytes = -(-shape.rows * keys // 8) + shape.requests
        self._wrapper = attention.graph_wrapper(shape.requests, keys, mask_bytes)
        zero = np.zeros(0, dtype=np.int32)
        nobody = Segment(zero, zero, zero, zero)
        layout = paged_layout([nobody])
        self.plan = FlashInferPlan(
            num_rows=shape.num_rows,
            write=write,
            groups=[],
            key_tokens=KeyTokens(0, 0),
            parts=[Part(layout, None, is_planned=True, wrapper=self._wrapper)],
        )

    def fill(self, segments: Sequence[Segment], rows: DeviceRows | None = None) -> KeyTokens:
        """See `StaticAttention`; the device makes no masks for this one."""
        assert rows is None or rows.seen is None
        everybody = filled([without_mask(segment) for segment in segments], self._shape, self._scratch)
        layout = paged_layout(everybody, self._shape.rows, masked=self._shape.rows > 1)
        self._attention.tell(self._wrapper, layout, 0, self._q_heads, self._scale)
        return KeyTokens(sum(key_counts(segments)), 0)


class TritonStatic:
    """Of `TritonAttention`: requests have as many rows and keys as they need, those of nobody none.

    What comes out for rows of padding, behind all others, is whatever memory held: nobody reads it.
    """

    def __init__(
        self, attention: TritonAttention, shape: Shape, write: torch.Tensor, max_tokens: int
    ) -> None:
        """Tables for `shape`; `max_tokens` bounds every context."""
        self._attention, self._shape = attention, shape
        num_segments = shape.requests * FIELDS
        self._segments_and_slots = attention.shared_integers(
            num_segments + most_keys(shape, max_tokens, attention.num_slots)
        )
        # The device lays out masks of equally many rows, the host only those that there are.
        masked_rows = max(shape.requests * min(shape.rows, MOST_TREE_ROWS), shape.num_rows)
        seen = attention.shared_integers(masked_rows * MOST_COLUMNS // 4, "masks")
        table = SegmentTable(
            segments=self._segments_and_slots[:num_segments],
            slots=self._segments_and_slots[num_segments:],
            seen=seen.view(torch.uint8),
        )
        self.plan = TritonPlan(
            num_rows=shape.num_rows,
            write=write,
            groups=[],
            key_tokens=KeyTokens(0, 0),
            table=table,
            most_rows=shape.rows,
            most_keys=max_tokens,
        )

    def fill(self, segments: Sequence[Segment], rows: DeviceRows | None = None) -> KeyTokens:
        """See `StaticAttention`."""
        shape, description = self._shape, described(segments)
        first_slot = shape.requests * FIELDS
        staged = staging(first_slot + description.num_keys, torch.int32, self._attention.device)
        values = staged.numpy()
        description.write(values, first_slot)
        nobody = values[len(description.table) : first_slot].reshape(-1, FIELDS)
        nobody[:], nobody[:, 5] = 0, -1
        nobody[:, 0] = sum(len(segment.slots) for segment in segments)  # first rows ascend
        self._segments_and_slots[: len(values)].copy_(staged, non_blocking=True)
        seen = description.seen
        if len(seen):
            overwrite(self.plan.table.seen[: len(seen)], seen)
        if rows is not None:
            self._attention.see_rows(self.plan.table, rows, max(len(segment.slots) for segment in segments))
        return KeyTokens(description.num_keys, 0)


def most_keys(shape: Shape, max_tokens: int, num_slots: int) -> int:
    """Keys of a batch of `shape`, over all requests, at most.

    `max_tokens` bounds how deep a tree may be at the end of a context, not how many rows it has.
    """
    return min(shape.requests * (max_tokens + MOST_COLUMNS), MOST_READS * num_slots)


def has_workspace(attention: PaddedAttention, shape: Shape, q_heads: int) -> bool:
    """Whether a backend can compute forwards of a shape with what `static_attention` makes."""
    if isinstance(attention, FlashInferAttention):
        return attention.has_workspace(shape.requests, shape.num_rows, q_heads)
    return True


def static_attention(
    attention: PaddedAttention,
    shape: Shape,
    scratch: int,
    write: torch.Tensor,
    *,
    q_heads: int,
    scale: float,
    max_tokens: int,
) -> StaticAttention:
    """Of a backend, for one shape.

    Args:
        attention: the backend.
        shape: of the forwards.
        scratch: a slot that no request holds.
        write: int64 [rows of `shape`], where it will stay: slots that the rows' keys are written to.
        q_heads: of the model.
        scale: of attention scores.
        max_tokens: of a context, at most.
    """
    if isinstance(attention, FlashInferAttention):
        return FlashInferStatic(
            attention, shape, scratch, write, q_heads=q_heads, scale=scale, max_tokens=max_tokens
        )
    if isinstance(attention, TritonAttention):
        return TritonStatic(attention, shape, write, max_tokens)
    return PaddedStatic(shape, scratch, write, attention.dtype)
