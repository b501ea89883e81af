"""Attention by FlashInfer's paged prefill kernels: causal rows and token trees in one forward, on CUDA.

FlashInfer (arXiv 2501.01005) reads keys and values where they lie, so nothing is gathered or padded. Trees
need a mask per request, which only one of its kernels takes and which costs a bit per row and key: so causal
rows (prompts, plain decoding) and trees go to two wrappers. Each is planned once a forward, when the first
layer attends, which is while the device computes that layer's projections; all layers share the plan.

Of this file nothing but `paged_layout` runs without a GPU. See docs/gpu.md for what was run on one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.attention import PaddedAttention, PaddedPlan
from engine.devices import to_device
from engine.paged_layout import PagedLayout, paged_layout, split_by_mask, without_mask
from engine.rectangles import first_rows, key_counts
from engine.runner import KeyTokens, Segment

#: For partial results of split keys. What FlashInfer's documentation recommends, 128 MiB, is too little where
#: forwards are captured, which reserve them for every row that any of their requests might have
#: (`workspace_bytes`): of what is captured when loading, 64 requests of 8 rows need the most, 135 MiB with 32
#: heads of 128 that share no keys, and 383 MiB with 64 of which 8 share theirs.
WORKSPACE_BYTES = 384 << 20
HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)


def why_not_flashinfer(dtype: torch.dtype, device: torch.device, head_dim: int | None = None) -> str | None:
    """What keeps FlashInfer from serving here; None if nothing."""
    if device.type != "cuda":
        return f"FlashInfer needs a CUDA device, not {device}"
    if dtype not in _DTYPES:
        return f"FlashInfer computes in float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"FlashInfer has kernels for head sizes {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (the extra `gpu`: pip install -e '.[gpu]' in the repository)"
    return None


def workspace_bytes(requests: int, rows: int, heads: int, kv_heads: int, dim: int) -> int:
    """What FlashInfer reserves of its workspace for a captured forward of `rows` in all, at most.

    As its planning counts (`PrefillSplitQOKVIndptr`, `PrefillPlanImpl`): float32, an output and a weight per
    head and row of all tiles of rows there can be, whichever request has how many of them. Versions before
    0.7 count query heads for key heads; the larger number is taken.
    """
    shared = heads // kv_heads
    longest = (rows - requests + 1) * shared
    tile = 16 if longest <= 16 else 64 if longest <= 64 or dim >= 256 else 128
    tiles = -(-rows * shared // tile) + requests - 1
    return tiles * tile * heads * (dim + 1) * 4


class Wrapper:
    """A wrapper of FlashInfer's that may be planned again before the device has done what was planned before.

    `plan` writes its schedule to memory of the host that the wrapper owns, from where the device copies it
    when it gets there. Who plans the next forward at once would overwrite it before.
    """

    def __init__(self, wrapper: Any) -> None:
        """Around one that nobody else plans."""
        self._wrapper = wrapper
        self._copied: torch.cuda.Event | None = None

    def plan(self, *layout: torch.Tensor | None, **options: Any) -> None:
        """As FlashInfer's, once the device has copied the schedule before.

        That is when it begins with the forward that was planned, so it is waited for the one before that.
        """
        if self._copied is None:
            self._copied = torch.cuda.Event()
        else:
            self._copied.synchronize()
        self._wrapper.plan(*layout, **options)
        self._copied.record()

    def run(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """As FlashInfer's."""
        out: torch.Tensor = self._wrapper.run(q, cache)
        return out


@dataclass(slots=True, eq=False)
class Part:
    """What one wrapper computes of a forward.

    Attributes:
        layout: its requests.
        rows: int64, their batch rows; None if it computes all.
        is_planned: whether the wrapper has been told.
        wrapper: its own, of a captured forward; None for one that all forwards share.
    """

    layout: PagedLayout
    rows: torch.Tensor | None
    is_planned: bool = False
    wrapper: Wrapper | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FlashInferPlan(PaddedPlan):
    """A `PaddedPlan` without groups: causal rows first, then trees."""

    parts: list[Part] = field(default_factory=list)


class FlashInferAttention(PaddedAttention):
    """`AttentionBackend` on FlashInfer; it stores keys and values as `PaddedAttention` does.

    A layer's storage [num_slots, 2 * kv_heads * dim] is FlashInfer's cache [pages, 2, 1, kv_heads, dim] of
    pages of one slot, without a copy. Keys and values must be of one size.
    """

    takes_device_masks = False  # packing a mask reads its size back
    pads_keys = False

    def __init__(self, num_slots: int, *, dtype: torch.dtype, device: torch.device | str = "cuda") -> None:
        """A pool of `num_slots` on a GPU.

        Raises:
            ValueError: if FlashInfer cannot serve there; the message says why.
        """
        super().__init__(num_slots, dtype=dtype, device=device)
        obstacle = why_not_flashinfer(dtype, self._device)
        if obstacle is not None:
            raise ValueError(f"attention `flashinfer`: {obstacle}")
        self._module: Any = importlib.import_module("flashinfer")
        self._wrappers: dict[bool, Wrapper] = {}
        self._scratch: torch.Tensor | None = None

    def allocate(self, layer: int, kv_heads: int, k_dim: int, v_dim: int) -> None:
        """See `PaddedAttention`.

        Raises:
            ValueError: if FlashInfer has no kernel for heads of this size.
        """
        obstacle = why_not_flashinfer(self._dtype, self._device, k_dim)
        if obstacle is None and k_dim != v_dim:
            obstacle = f"keys of {k_dim} and values of {v_dim} numbers"
        if obstacle is not None:
            raise ValueError(f"attention `flashinfer`: {obstacle}; use `padded`")
        super().allocate(layer, kv_heads, k_dim, v_dim)

    def plan(self, segments: Sequence[Segment]) -> FlashInferPlan:
        """See `AttentionBackend`."""
        starts = first_rows(segments)
        segments = [without_mask(segment) for segment in segments]
        parts = []
        for members in split_by_mask(segments):
            if not members:
                continue
            rows = None
            if len(members) < len(segments):
                numbers = [np.arange(starts[index], starts[index + 1]) for index in members]
                rows = self._tensor(np.concatenate(numbers))
            parts.append(Part(paged_layout([segments[index] for index in members]), rows))
        write = np.concatenate([segment.slots for segment in segments]).astype(np.int64)
        return FlashInferPlan(
            num_rows=starts[-1],
            write=self._tensor(write),
            groups=[],
            key_tokens=KeyTokens(sum(key_counts(segments)), 0),
            parts=parts,
        )

    def attend(
        self, plan: PaddedPlan, layer: int, q: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        assert isinstance(plan, FlashInferPlan)
        for part in plan.parts:
            if not part.is_planned:
                self.tell(self._wrapper(part), part.layout, layer, q.shape[1], scale)
                part.is_planned = True
        first = plan.parts[0]
        if first.rows is None:
            return self.run_wrapper(self._wrapper(first), layer, q)
        out = torch.empty_like(q).flatten(1)
        for part in plan.parts:
            assert part.rows is not None
            asked = q.index_select(0, part.rows)
            out.index_copy_(0, part.rows, self.run_wrapper(self._wrapper(part), layer, asked))
        return out

    def run_wrapper(self, wrapper: Wrapper, layer: int, q: torch.Tensor) -> torch.Tensor:
        """[rows, q_heads * dim] of queries [rows, q_heads, dim], by a wrapper that was told the batch."""
        kv_heads, dim, _ = self._shapes[layer]
        cache = self._layers[layer].view(self.num_slots, 2, 1, kv_heads, dim)
        return wrapper.run(q.contiguous(), cache).flatten(1)

    def tell(
        self, wrapper: Wrapper, layout: PagedLayout, layer: int, q_heads: int, scale: float | None
    ) -> None:
        """Plan a wrapper for a batch, for all layers like `layer`."""
        kv_heads, dim, _ = self._shapes[layer]
        indptrs = [torch.from_numpy(a) for a in (layout.qo_indptr, layout.kv_indptr, layout.last_page_len)]
        mask = None
        if layout.mask is not None:
            mask = to_device(torch.from_numpy(layout.mask), self._device)
            # The kernel that packs a mask reads the offsets of the requests on the device. Without a mask
            # they are left on the host, where the planning needs them.
            indptrs = [to_device(tensor, self._device) for tensor in indptrs]
        qo_indptr, kv_indptr, last_page_len = indptrs
        wrapper.plan(
            qo_indptr,
            kv_indptr,
            to_device(torch.from_numpy(layout.kv_indices), self._device),
            last_page_len,
            num_qo_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim_qk=dim,
            page_size=1,
            custom_mask=mask,
            causal=mask is None,
            sm_scale=scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def has_workspace(self, requests: int, rows: int, q_heads: int) -> bool:
        """Whether `graph_wrapper` can be planned for `requests` of `rows` in all."""
        kv_heads, dim, _ = self._shapes[0]
        return workspace_bytes(requests, rows, q_heads, kv_heads, dim) <= WORKSPACE_BYTES

    def graph_wrapper(self, requests: int, most_keys: int, mask_bytes: int) -> Wrapper:
        """A wrapper for a captured forward of `requests`, with buffers of its own.

        Args:
            requests: of every batch.
            most_keys: over all requests.
            mask_bytes: of the packed mask; 0 for a causal wrapper. A wrapper that has a mask buffer reads it
                whether or not the plan had a mask, so that the two must not be one.
        """

        def integers(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=self._device)

        masks = {}
        if mask_bytes:
            masks = {
                "custom_mask_buf": torch.zeros(mask_bytes, dtype=torch.uint8, device=self._device),
                "mask_indptr_buf": integers(requests + 1),
            }
        return self._made(
            use_cuda_graph=True,
            qo_indptr_buf=integers(requests + 1),
            paged_kv_indptr_buf=integers(requests + 1),
            paged_kv_indices_buf=integers(most_keys),
            paged_kv_last_page_len_buf=integers(requests),
            **masks,
        )

    def _made(self, **options: Any) -> Wrapper:
        # Left to choose, FlashInfer would on Hopper build another kernel for whoever has no mask: minutes of
        # CUTLASS, with headers (curand) that not every machine has.
        make = self._module.BatchPrefillWithPagedKVCacheWrapper
        return Wrapper(make(self._workspace(), "NHD", backend="fa2", **options))

    def _workspace(self) -> torch.Tensor:
        """One for all wrappers: only one of them computes at a time."""
        if self._scratch is None:
            self._scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        return self._scratch

    def _wrapper(self, part: Part) -> Wrapper:
        if part.wrapper is not None:
            return part.wrapper
        has_mask = part.layout.mask is not None
        if has_mask not in self._wrappers:
            self._wrappers[has_mask] = self._made()
        return self._wrappers[has_mask]
