"""Attention by kernels in Triton: prompts, plain decoding and trees in one launch, keys read where they lie.

For CUDA where FlashInfer is not: in float32 too, for any head size, with masks that the device made, and
without planning, so that a draft call's trees grow without the host. Keys are split over processors where
requests are few. Kernels are compiled when they are first needed, by the compiler that Triton brings.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention import PaddedAttention, PaddedPlan
from engine.attention_tiles import FEW_PROGRAMS, MOST_SPLITS, QUERIES, Tile, num_splits, tile_of
from engine.device_rows import DeviceRows
from engine.devices import staging, to_device
from engine.norms import PendingNorm, norm_arguments, norm_block
from engine.padded_segments import power_of_two
from engine.rectangles import key_counts
from engine.runner import KeyTokens, Segment
from engine.scoring import USUAL, Scoring
from engine.segment_table import FIELDS, SegmentTable, described
from engine.triton_support import why_not_triton

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class TritonPlan(PaddedPlan):
    """A `PaddedPlan` without groups.

    Attributes:
        table: the batch.
        most_rows: of a segment.
        most_keys: of a segment, or about as many at most: it decides into how many parts keys go, no more.
        ends_with_rows: whether the last keys of each segment are those of its rows, in their order.
        positions: int32 [rows] of the batch, for layers with windows; None where there are none.
    """

    table: SegmentTable
    most_rows: int
    most_keys: int
    ends_with_rows: bool = True
    positions: torch.Tensor | None = None

    @property
    def num_segments(self) -> int:
        """Segments of the batch."""
        return len(self.table.segments) // FIELDS


class New(NamedTuple):
    """What attention is to do with queries, keys and values before, where each segment has one row.

    Attributes:
        rotation: complex64, see `engine.rotary`.
        norm: they are to have before that, if any.
    """

    rotation: torch.Tensor
    norm: PendingNorm | None


class TritonAttention(PaddedAttention):
    """`AttentionBackend` in Triton; it stores keys and values as `PaddedAttention` does."""

    pads_keys = False
    pads_rows = False
    scores_by_layer = True

    def __init__(self, num_slots: int, *, dtype: torch.dtype, device: torch.device | str = "cuda") -> None:
        """A pool of `num_slots` on a GPU.

        Raises:
            ValueError: if Triton cannot serve there; the message says why.
        """
        super().__init__(num_slots, dtype=dtype, device=device)
        obstacle = why_not_triton(self._device)
        if obstacle is not None:
            raise ValueError(f"attention `triton`: {obstacle}")
        self._kernels: Any = importlib.import_module("engine.attention_kernels")
        self._row_kernels: Any = importlib.import_module("engine.row_kernels")
        self._integers: dict[tuple[int, str], torch.Tensor] = {}
        self._scoring: dict[int, Scoring] = {}  # of layers that do not as usual

    def shared_integers(self, number: int, of: str = "forwards") -> torch.Tensor:
        """int32 [number] that stays where it is, one for all who ask for as many by the same name: forwards
        of fixed shapes, of which only one is under way at a time."""
        if (number, of) not in self._integers:
            self._integers[number, of] = torch.zeros(number, dtype=torch.int32, device=self._device)
        return self._integers[number, of]

    def set_scoring(self, layer: int, scoring: Scoring) -> None:
        """See `PaddedAttention`; for a layer with a window plans need `positions`."""
        if scoring == USUAL:
            self._scoring.pop(layer, None)
        else:
            self._scoring[layer] = scoring

    def plan(self, segments: Sequence[Segment]) -> TritonPlan:
        """See `AttentionBackend`."""
        description = described(segments)
        seen = description.seen
        # One transfer for all of it, from where it is written to.
        sizes = [len(description.table), description.num_keys]
        staged = staging(sum(sizes) + -(-len(seen) // 4), torch.int32, self._device)
        whole = staged.numpy()
        description.write(whole, sizes[0])
        whole[sum(sizes) :].view(np.uint8)[: len(seen)] = seen
        there = to_device(staged, self._device)
        on_device = SegmentTable(
            segments=there[: sizes[0]],
            slots=there[sizes[0] : sum(sizes)],
            seen=there[sum(sizes) :].view(torch.uint8),
        )
        return self._plan_of(segments, on_device)

    def plan_rows(self, segments: Sequence[Segment], rows: DeviceRows) -> TritonPlan:
        """See `PaddedAttention`."""
        plan = self.plan(segments)
        if rows.seen is not None:
            num_bytes = len(rows.seen) * plan.most_rows * rows.seen.shape[2]
            plan.table.seen = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self.see_rows(plan.table, rows, plan.most_rows)
        return plan

    def see_rows(self, table: SegmentTable, rows: DeviceRows, most_rows: int) -> None:
        """Let the rows of a batch see what the device says.

        Args:
            table: of the batch; its `seen` is overwritten where it lies.
            rows: of the batch.
            most_rows: of a segment; the device may have laid out more.
        """
        if rows.seen is None:
            return
        segments, laid_out, columns = rows.seen.shape
        self._kernels.see[(segments,)](
            table.segments,
            rows.committed,
            rows.seen.contiguous().view(torch.uint8),
            table.seen,
            most_rows,
            laid_out,
            columns,
            BYTES=1024,
            num_warps=4,
        )

    def _plan_of(self, segments: Sequence[Segment], table: SegmentTable) -> TritonPlan:
        counts, keys = [len(segment.slots) for segment in segments], key_counts(segments)
        write = np.concatenate([segment.slots for segment in segments]).astype(np.int64)
        return TritonPlan(
            num_rows=sum(counts),
            write=self._tensor(write),
            groups=[],
            key_tokens=KeyTokens(sum(keys), 0),
            table=table,
            most_rows=max(counts),
            most_keys=max(keys),
        )

    def store_rotated(
        self,
        plan: PaddedPlan,
        layer: int,
        qkv: torch.Tensor,
        rotation: torch.Tensor,
        heads: int,
        norm: PendingNorm | None = None,
    ) -> None:
        """See `PaddedAttention`; `norm` is applied to `qkv` before, if keys and values are of one size."""
        kv_heads, dim, v_dim = self._shapes[layer]
        if dim != v_dim:
            assert norm is None
            super().store_rotated(plan, layer, qkv, rotation, heads)
            return
        storage = self._layers[layer]
        self._row_kernels.rotate_and_store[len(qkv), heads + 2 * kv_heads](
            qkv,
            torch.view_as_real(rotation),
            storage,
            plan.write,
            qkv.stride(0),
            storage.stride(0),
            *norm_arguments(norm, qkv),
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            HALF_BLOCK=power_of_two(dim // 2),
            NORM_BLOCK=norm_block(norm),
            num_warps=1 if norm is None else 4,
        )

    def attend(
        self, plan: PaddedPlan, layer: int, q: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        assert isinstance(plan, TritonPlan)
        return self._attend(plan, layer, q, scale, *self._cut(plan, layer, q.shape[1]))

    def attend_rotated(
        self,
        plan: PaddedPlan,
        layer: int,
        qkv: torch.Tensor,
        rotation: torch.Tensor,
        heads: int,
        scale: float | None = None,
        norm: PendingNorm | None = None,
    ) -> torch.Tensor:
        """See `PaddedAttention`; `norm` as of `store_rotated`. One launch where segments have a row each."""
        assert isinstance(plan, TritonPlan)
        kv_heads, dim, v_dim = self._shapes[layer]
        tile, splits = self._cut(plan, layer, heads)
        q = qkv[:, : heads * dim].view(len(qkv), heads, dim)
        is_one_tile = heads // kv_heads <= tile.queries
        is_usual = dim == v_dim and layer not in self._scoring
        if plan.most_rows == 1 and plan.ends_with_rows and is_one_tile and is_usual:
            return self._attend(plan, layer, q, scale, tile, splits, New(rotation, norm))
        self.store_rotated(plan, layer, qkv, rotation, heads, norm)
        return self._attend(plan, layer, q, scale, tile, splits)

    def _cut(self, plan: TritonPlan, layer: int, heads: int) -> tuple[Tile, int]:
        """What a batch is computed in: tiles of this size, and keys in so many parts."""
        kv_heads, k_dim, _ = self._shapes[layer]
        shared, window = heads // kv_heads, self._scoring.get(layer, USUAL).window
        queries, pairs = plan.most_rows * shared, plan.num_segments * kv_heads
        tile = tile_of(queries, k_dim, self._dtype, pairs, has_window=window is not None)
        programs = _num_tiles(plan, shared, tile) * kv_heads
        most_keys = plan.most_keys if window is None else min(plan.most_keys, window + tile.queries)
        return tile, num_splits(programs, most_keys, tile.keys)

    def prepare(self, layer: int, heads: int, late_norm: torch.Tensor | None = None) -> None:
        """See `PaddedAttention`: compile the kernels that batches of layers like `layer` may need.

        `late_norm` is a row [1, size] as those whose norm is left to attention, where any is.
        """
        kv_heads, k_dim, v_dim = self._shapes[layer]
        few, has_window = (1, FEW_PROGRAMS + 1), self._scoring.get(layer, USUAL).window is not None
        tiles = {
            tile_of(number, k_dim, self._dtype, pairs, has_window=has_window)
            for number in QUERIES
            for pairs in few
        }
        ways = [(tile, splits) for tile in tiles for splits in (1, 2)]
        # What sums the splits is compiled for each power of two of them, whatever the tile is.
        ways += [(ways[0][0], 1 << power) for power in range(2, MOST_SPLITS.bit_length())]
        plan, of_several = (self._plan_of_nobody(rows) for rows in (1, QUERIES[-1] + 1))
        several = tile_of(QUERIES[-1] + 1, k_dim, self._dtype, 1, has_window=has_window)
        rows = of_several.num_rows
        qkv = torch.zeros(rows, heads + 2 * kv_heads, k_dim, dtype=self._dtype, device=self._device)
        for splits in (1, 2):
            self._attend(of_several, layer, qkv[:, :heads], None, several, splits)
        qkv = qkv[:1]
        for tile, splits in ways:
            self._attend(plan, layer, qkv[:, :heads], None, tile, splits)
        rotation = torch.ones(1, k_dim // 2, dtype=torch.complex64, device=self._device)
        norms = [None] if late_norm is None else [None, PendingNorm(late_norm, 1.0)]
        for (tile, splits), norm in itertools.product(ways, norms):
            is_usual = k_dim == v_dim and layer not in self._scoring
            is_met = tile.queries == QUERIES[0] and splits <= 2 and is_usual
            if is_met and heads // kv_heads <= tile.queries:
                self._attend(plan, layer, qkv[:, :heads], None, tile, splits, New(rotation, norm))

    def _plan_of_nobody(self, rows: int) -> TritonPlan:
        """One prompt of so many rows, all in the first slot."""
        zeros = np.zeros(rows, dtype=np.int32)
        plan = self.plan([Segment(zeros, zeros, zeros, zeros[:0])])
        return replace(plan, positions=torch.zeros(rows, dtype=torch.int32, device=self._device))

    def _attend(
        self,
        plan: TritonPlan,
        layer: int,
        q: torch.Tensor,
        scale: float | None,
        tile: Tile,
        splits: int,
        new: New | None = None,
    ) -> torch.Tensor:
        """`attend`, with tiles of this size and keys in so many parts.

        With `new`, `attend_rotated`: behind the query heads of `q` lie the key and value heads.
        """
        norm = None if new is None else new.norm
        scoring = self._scoring.get(layer, USUAL)
        assert scoring.window is None or plan.positions is not None
        kv_heads, k_dim, v_dim = self._shapes[layer]
        rows, heads, _ = q.shape
        if q.stride(2) != 1:
            q = q.contiguous()
        shared = heads // kv_heads
        out = torch.empty(rows, heads * v_dim, dtype=q.dtype, device=q.device)
        partial = weight = out
        if splits > 1:
            partial = torch.empty(splits, rows, heads, v_dim, dtype=torch.float32, device=q.device)
            weight = torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
        storage = self._layers[layer]
        self._kernels.attend[_num_tiles(plan, shared, tile) * kv_heads, splits, 1](
            q,
            q if new is None else torch.view_as_real(new.rotation),
            q if norm is None else norm.x,
            storage,
            out,
            partial,
            weight,
            plan.table.segments,
            plan.table.slots,
            plan.table.seen,
            (k_dim**-0.5 if scale is None else scale) * math.log2(math.e),
            q.stride(0),
            q.stride(1),
            storage.stride(0),
            rows,
            splits,
            plan.num_segments,
            *norm_arguments(norm, q)[1:],
            plan.table.segments if plan.positions is None else plan.positions,
            q if scoring.sinks is None else scoring.sinks,
            scoring.window or 0,
            (scoring.softcap or 0.0) * math.log2(math.e),
            KV_HEADS=kv_heads,
            SHARED=shared,
            K_DIM=k_dim,
            V_DIM=v_dim,
            K_BLOCK=max(16, power_of_two(k_dim)),
            V_BLOCK=max(16, power_of_two(v_dim)),
            QUERIES=tile.queries,
            KEYS=tile.keys,
            IS_SPLIT=splits > 1,
            IS_TILED=_has_several(plan, shared, tile),
            IS_NEW=new is not None,
            NORM_BLOCK=norm_block(norm),
            HAS_WINDOW=scoring.window is not None,
            HAS_SINKS=scoring.sinks is not None,
            HAS_CAP=scoring.softcap is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            self._kernels.combine[(rows * heads,)](
                partial,
                weight,
                out,
                rows * heads,
                splits,
                V_DIM=v_dim,
                V_BLOCK=power_of_two(v_dim),
                SPLITS=power_of_two(splits),
                num_warps=4,
            )
        return out


def _has_several(plan: TritonPlan, shared: int, tile: Tile) -> bool:
    """Whether a segment may have several tiles, of queries of which `shared` have a key head together."""
    return plan.most_rows * shared > tile.queries


def _num_tiles(plan: TritonPlan, shared: int, tile: Tile) -> int:
    """Tiles of a batch, and up to one more per segment (see `attend` of `engine.attention_kernels`)."""
    if not _has_several(plan, shared, tile):
        return plan.num_segments
    return plan.num_rows * shared // tile.queries + plan.num_segments
