"""Attention of a ragged batch of token trees over paged keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.device_rows import DeviceRows
from engine.devices import to_device
from engine.rectangles import first_rows, key_counts, key_slots, partition, rectangle
from engine.rotary import rotate
from engine.runner import KeyTokens, Segment
from engine.scoring import Scoring

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Plan = TypeVar("Plan")
RectangleMask = Callable[[int, int], torch.Tensor]
"""From rows and keys to float [segments, 1, rows, keys], what to add to scores."""

CHUNK_BYTES = 4 << 20
"""Keys and values gathered at a time on a CPU: few enough that its cache still has them when they are used.
Batches of 10,000 keys and more take a fifth less time than with all gathered first."""


class AttentionBackend(Protocol[Plan]):
    """Holds keys and values of all layers, and attends over them.

    A forward pass calls `plan` once, then `run` once per layer. `store` and `attend` are its two halves.
    """

    def plan(self, segments: Sequence[Segment]) -> Plan:
        """Everything about the batch that layers share: indices and masks."""
        ...

    def store(self, plan: Plan, layer: int, kv: torch.Tensor) -> None:
        """Write the batch's keys and values, [rows, kv_heads * (k_dim + v_dim)], keys first, to its slots."""
        ...

    def attend(self, plan: Plan, layer: int, q: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Attention output [rows, q_heads * v_dim] of queries [rows, q_heads, k_dim].

        `scale` multiplies the scores; None is `k_dim ** -0.5`.
        """
        ...

    def run(
        self,
        plan: Plan,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:
        """`store` then `attend`, with k [rows, kv_heads, k_dim] and v [rows, kv_heads, v_dim]."""
        ...


@dataclass(slots=True, eq=False)
class Group:
    """Segments attended to together, padded to one rectangle of `rows` queries and `keys` keys each.

    Attributes:
        read: int64 [segments * keys], slots of the keys; for padding, a slot of the same segment, so that
            one request's values can never reach another's.
        first_slot: where `read` is a run of neighbouring slots, its first; else -1.
        mask: float [segments, 1, rows, keys] to add to the scores; None if all keys are visible to all rows.
        gather: int64 [segments * rows], batch row of each (padded) query; None if they are `span`.
        keep: int64 [n], which of the padded rows are real; `target` int64 [n], their batch rows.
        span: batch rows of the group, where they are adjacent and unpadded.
        folded: the mask with its rows repeated for the query heads that share a key head.
    """

    segments: int
    rows: int
    keys: int
    read: torch.Tensor
    first_slot: int
    mask: torch.Tensor | None
    gather: torch.Tensor | None
    keep: torch.Tensor | None
    target: torch.Tensor | None
    span: slice
    folded: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class PaddedPlan:
    """Plan of one forward: `write` int64 [rows], slots the batch writes, padded groups, and their keys."""

    num_rows: int
    write: torch.Tensor
    groups: list[Group]
    key_tokens: KeyTokens


class PaddedAttention:
    """Attention by PyTorch's `scaled_dot_product_attention` over gathered, padded keys and values.

    Segments are grouped so that a long prompt chunk and single decoded rows are not padded to one
    rectangle. Storage of a layer is one tensor [num_slots, kv_heads * (k_dim + v_dim)], so that a token
    is written and gathered in one piece; it is allocated when the layer is first stored to, or by `allocate`.

    Attributes:
        num_slots: KV slots of the pool.
        chunk_bytes: most bytes of keys and values gathered at a time, but always at least one segment's.
        takes_device_masks: whether masks may be made on the device, see `plan_rows`.
        pads_keys, pads_rows: whether a plan of fixed shape has as many keys, and rows, for every request.
        scores_by_layer: whether layers with windows, sinks or capped scores share one plan with others.
    """

    chunk_bytes = CHUNK_BYTES
    takes_device_masks = True
    pads_keys = True
    pads_rows = True
    scores_by_layer = False

    def __init__(self, num_slots: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.num_slots = num_slots
        self._dtype = dtype
        self._device = torch.device(device)
        self._layers: dict[int, torch.Tensor] = {}
        self._shapes: dict[int, tuple[int, int, int]] = {}
        self._buffer = torch.empty(0, dtype=dtype, device=self._device)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys, values and masks."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self._device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers allocated so far."""
        return sum(layer.shape[1] * layer.element_size() for layer in self._layers.values())

    def resize(self, num_slots: int) -> None:
        """Make the pool one of `num_slots`, zeroed: what it held is gone."""
        self.num_slots = num_slots
        for layer, old in list(self._layers.items()):
            width = old.shape[1]
            del old
            self._layers[layer] = torch.empty(0, width, dtype=self._dtype, device=self._device)
        for layer, empty in self._layers.items():
            self._layers[layer] = torch.zeros(
                num_slots, empty.shape[1], dtype=self._dtype, device=self._device
            )

    def allocate(self, layer: int, kv_heads: int, k_dim: int, v_dim: int) -> None:
        """Give `layer` zeroed storage. Does nothing if it has it already."""
        if layer in self._layers:
            return
        width = kv_heads * (k_dim + v_dim)
        self._layers[layer] = torch.zeros(self.num_slots, width, dtype=self._dtype, device=self._device)
        self._shapes[layer] = (kv_heads, k_dim, v_dim)

    def prepare(self, layer: int, heads: int, late_norm: torch.Tensor | None = None) -> None:
        """Do beforehand what the first batches of an allocated layer with so many query heads would wait for.

        Nothing here.
        """

    def set_scoring(self, layer: int, scoring: Scoring) -> None:
        """From now on a layer scores like this; here only as usual, with windows that are in plans."""

    def storage(self, layer: int) -> torch.Tensor:
        """[num_slots, kv_heads * (k_dim + v_dim)], keys and values of all slots, keys of all heads first."""
        return self._layers[layer]

    def plan(self, segments: Sequence[Segment]) -> PaddedPlan:
        """See `AttentionBackend`."""
        return self._plan(segments, self.partition(segments))

    def plan_rows(self, segments: Sequence[Segment], rows: DeviceRows) -> PaddedPlan:
        """As `plan`, with what the device says of the rows."""
        if rows.seen is None:
            return self.plan(segments)
        return self._plan(segments, [list(range(len(segments)))], rows.mask)

    def _plan(
        self, segments: Sequence[Segment], partition: list[list[int]], mask: RectangleMask | None = None
    ) -> PaddedPlan:
        starts = first_rows(segments)
        write = np.concatenate([segment.slots for segment in segments]).astype(np.int64)
        groups = [self._group(segments, members, starts, mask) for members in partition]
        keys = sum(key_counts(segments))
        padding = sum(group.segments * group.keys for group in groups) - keys
        return PaddedPlan(starts[-1], self._tensor(write), groups, KeyTokens(keys, padding))

    def partition(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Indices of the segments of each group, ascending within a group."""
        return partition(segments)

    def store(self, plan: PaddedPlan, layer: int, kv: torch.Tensor) -> None:
        """See `AttentionBackend`."""
        self._layers[layer].index_copy_(0, plan.write, kv)

    def store_rotated(
        self, plan: PaddedPlan, layer: int, qkv: torch.Tensor, rotation: torch.Tensor, heads: int
    ) -> None:
        """Rotate the query heads of `qkv` in place, and store its key heads, rotated, and value heads.

        Args:
            plan, layer: as for `store`.
            qkv: [rows, (heads + 2 * kv_heads) * dim], query, key and value heads; what is left of the keys
                means nothing.
            rotation: see `engine.rotary`.
            heads: of queries.
        """
        kv_heads, dim, _ = self._shapes[layer]
        rotate(qkv, rotation, heads + kv_heads, dim)
        self.store(plan, layer, qkv[:, heads * dim :])

    def attend_rotated(
        self,
        plan: PaddedPlan,
        layer: int,
        qkv: torch.Tensor,
        rotation: torch.Tensor,
        heads: int,
        scale: float | None = None,
    ) -> torch.Tensor:
        """`store_rotated`, then `attend` with its query heads; what is left of `qkv` means nothing."""
        self.store_rotated(plan, layer, qkv, rotation, heads)
        dim = self._shapes[layer][1]
        return self.attend(plan, layer, qkv[:, : heads * dim].view(len(qkv), heads, dim), scale)

    def run(
        self,
        plan: PaddedPlan,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        self.allocate(layer, k.shape[1], k.shape[2], v.shape[2])
        self.store(plan, layer, torch.cat([k.flatten(1), v.flatten(1)], dim=1))
        return self.attend(plan, layer, q, scale)

    def attend(
        self, plan: PaddedPlan, layer: int, q: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        if len(plan.groups) == 1 and plan.groups[0].gather is None:
            return self._attend_group(plan.groups[0], layer, q, scale)
        v_dim = self._shapes[layer][2]
        out = q.new_empty(plan.num_rows, q.shape[1] * v_dim)
        self._attend_groups(plan.groups, layer, q, scale, out)
        return out

    def _attend_groups(
        self, groups: Sequence[Group], layer: int, q: torch.Tensor, scale: float | None, out: torch.Tensor
    ) -> None:
        for group in groups:
            if group.gather is None:
                out[group.span] = self._attend_group(group, layer, q[group.span], scale)
                continue
            assert group.keep is not None
            assert group.target is not None
            padded = self._attend_group(group, layer, q.index_select(0, group.gather), scale)
            out.index_copy_(0, group.target, padded.index_select(0, group.keep))

    def _attend_group(self, group: Group, layer: int, q: torch.Tensor, scale: float | None) -> torch.Tensor:
        kv_heads, k_dim, v_dim = self._shapes[layer]
        segments, rows, keys = group.segments, group.rows, group.keys
        shared = q.shape[1] // kv_heads
        # Query heads that share a key head become further rows of it: grouped-query attention without
        # repeating keys.
        mask = group.mask
        if rows == 1:
            q = q.view(segments, kv_heads, shared, k_dim)
        else:
            q = q.view(segments, rows, kv_heads, shared, k_dim).transpose(1, 2)
            q = q.reshape(segments, kv_heads, rows * shared, k_dim)
            if mask is not None and shared > 1:
                if shared not in group.folded:
                    group.folded[shared] = mask.repeat_interleave(shared, dim=2)
                mask = group.folded[shared]
        if group.first_slot >= 0:
            run = self._layers[layer].narrow(0, group.first_slot, keys)
            k, v = self._keys_and_values(run, layer, segments)
            out = self._weighted(layer, q, k, v, mask, scale)
        else:
            parts = []
            for part, k, v in self._gathered(group.read, layer, segments):
                part_mask = None if mask is None else mask[part]
                parts.append(self._weighted(layer, q[part], k, v, part_mask, scale))
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if rows > 1:
            out = out.view(segments, kv_heads, rows, shared, v_dim).transpose(1, 2)
        return out.reshape(segments * rows, -1)

    def _weighted(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    def _gathered(
        self, read: torch.Tensor, layer: int, lines: int
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Keys and values of the slots `read` [lines * keys], some lines at a time.

        Which lines, and their keys and values [lines, kv_heads, keys, dim], overwritten by the next ones.
        """
        storage = self._layers[layer]
        keys = len(read) // lines
        line_bytes = keys * storage.shape[1] * storage.element_size()
        parts = -(-lines * line_bytes // self.chunk_bytes) if self._device.type == "cpu" else 1
        step = max(1, -(-lines // parts))
        for first in range(0, lines, step):
            part = slice(first, min(first + step, lines))
            rows = self._gather(read[part.start * keys : part.stop * keys], storage)
            yield part, *self._keys_and_values(rows, layer, part.stop - part.start)

    def _keys_and_values(self, kv: torch.Tensor, layer: int, lines: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [lines, kv_heads, keys, dim] of `kv` [lines * keys, width]."""
        kv_heads, k_dim, v_dim = self._shapes[layer]
        keys = len(kv) // lines
        if k_dim == v_dim:
            k, v = kv.view(lines, keys, 2, kv_heads, k_dim).permute(2, 0, 3, 1, 4).unbind(0)
            return k, v
        split = kv_heads * k_dim
        k = kv[:, :split].view(lines, keys, kv_heads, k_dim).transpose(1, 2)
        v = kv[:, split:].view(lines, keys, kv_heads, v_dim).transpose(1, 2)
        return k, v

    def _gather(self, read: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
        """[len(read), width] of `storage`; overwritten by the next call."""
        length, width = len(read), storage.shape[1]
        if self._device.type != "cpu":  # a captured forward must not share memory that may be given up
            return torch.index_select(storage, 0, read)
        # One buffer for all layers: it stays in the cache, and needs no fresh pages.
        if self._buffer.numel() < length * width:
            self._buffer = torch.empty(length * width * 5 // 4, dtype=self._dtype, device=self._device)
        out = self._buffer[: length * width].view(length, width)
        return torch.index_select(storage, 0, read, out=out)

    def _tensor(self, array: Int64 | Float32) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self._device)

    def _group(
        self,
        segments: Sequence[Segment],
        members: list[int],
        starts: list[int],
        mask_of: RectangleMask | None = None,
    ) -> Group:
        chosen = [segments[index] for index in members]
        row_counts = [len(segment.slots) for segment in chosen]
        counts = key_counts(chosen)
        rows, keys, size = max(row_counts), max(counts), len(chosen)
        if mask_of is None:
            read, host_mask = rectangle(chosen, rows, keys)
            mask = None if host_mask is None else self._tensor(host_mask).unsqueeze(1)
        else:
            read, mask = key_slots(chosen, keys), mask_of(rows, keys)
        first = int(read[0, 0])
        is_run = size == 1 and int(read[0, -1]) - first == keys - 1 and bool((np.diff(read[0]) == 1).all())
        padded = min(row_counts) < rows
        adjacent = members[-1] - members[0] == size - 1
        gather = keep = target = None
        if padded or not adjacent:
            columns = np.arange(rows)
            real = columns < np.array(row_counts)[:, None]
            batch_rows = np.where(real, columns, 0) + np.array([starts[index] for index in members])[:, None]
            gather = self._tensor(batch_rows.reshape(-1))
            keep = self._tensor(np.flatnonzero(real))
            target = self._tensor(batch_rows[real])
        return Group(
            segments=size,
            rows=rows,
            keys=keys,
            read=self._tensor(read.reshape(-1)),
            first_slot=first if is_run else -1,
            mask=None if mask is None else mask.to(self._dtype),
            gather=gather,
            keep=keep,
            target=target,
            span=slice(starts[members[0]], starts[members[-1] + 1]),
        )
