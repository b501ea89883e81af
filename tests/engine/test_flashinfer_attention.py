"""What FlashInfer is told, with a stand-in that refuses what its wrappers refuse and computes nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engine.flashinfer_attention import WORKSPACE_BYTES, FlashInferAttention, workspace_bytes
from engine.padded_segments import Shape, shape_of
from engine.static_attention import FlashInferStatic, has_workspace
from engine.warm_up import usual_batches
from tests.engine.test_static_forwards import batch
from tests.examples import examples

SLOTS = 600
HEADS, DIM = 2, 64


class Device:
    """Notes what the host plans and waits for, and what the device is to say when it is there."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def event(self) -> Device.Event:
        return Device.Event(self.notes)

    class Event:
        def __init__(self, notes: list[str]) -> None:
            self.notes = notes

        def record(self) -> None:
            self.notes.append("record")

        def synchronize(self) -> None:
            self.notes.append("wait")


class PlainWrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, as far as its `plan` (0.7.2) looks at sizes."""

    notes: list[str]

    def __init__(
        self, workspace: torch.Tensor, layout: str, *, backend: str = "auto", **buffers: Any
    ) -> None:
        assert backend == "fa2"  # `auto` builds CUTLASS for minutes on Hopper
        self.buffers = buffers

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *,
        custom_mask: torch.Tensor | None,
        **options: Any,
    ) -> None:
        self.notes.append("plan")
        assert len(last_page_len) == len(qo_indptr) - 1 == len(kv_indptr) - 1
        if not self.buffers.get("use_cuda_graph"):
            return
        assert len(qo_indptr) == len(self.buffers["qo_indptr_buf"])
        assert len(indices) <= len(self.buffers["paged_kv_indices_buf"])
        if custom_mask is not None:
            bits = (qo_indptr[1:] - qo_indptr[:-1]) * (kv_indptr[1:] - kv_indptr[:-1])
            assert int(((bits + 7) // 8).sum()) <= len(self.buffers["custom_mask_buf"])

    def run(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(q)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(PlainWrapper, "notes", found.notes, raising=False)
    return found


@pytest.fixture
def attention(device: Device, monkeypatch: pytest.MonkeyPatch) -> FlashInferAttention:
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PlainWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("engine.flashinfer_attention.why_not_flashinfer", lambda *args: None)
    found = FlashInferAttention(SLOTS, dtype=torch.float16, device="cpu")
    found.allocate(0, HEADS, DIM, DIM)
    return found


def static(attention: FlashInferAttention, shape: Shape, max_tokens: int) -> FlashInferStatic:
    write = torch.zeros(shape.num_rows, dtype=torch.int64)
    return FlashInferStatic(
        attention, shape, SLOTS - 1, write, q_heads=2 * HEADS, scale=0.1, max_tokens=max_tokens
    )


@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    trees=st.lists(
        st.tuples(st.integers(20, 32), st.integers(1, 9), st.sampled_from(["tree", "wide"])),
        min_size=1,
        max_size=5,
    )
)
def test_trees_at_the_end_of_contexts_fit_in_what_is_captured(
    attention: FlashInferAttention, trees: list[tuple[int, int, str]]
) -> None:
    """They are cut by depth: context and rows together may be more than the model's longest sequence."""
    segments = batch(np.random.default_rng(0), trees, np.arange(SLOTS))
    static(attention, shape_of(segments, with_keys=False), max_tokens=32).fill(segments)


def test_a_schedule_is_overwritten_only_when_the_device_has_copied_it(
    attention: FlashInferAttention, device: Device
) -> None:
    """Layers of a draft are forwarded one after the other, and nobody waits for what they compute."""
    segments = batch(np.random.default_rng(0), [(5, 1, "causal")], np.arange(SLOTS))
    captured = [static(attention, Shape(1, 1, 0), max_tokens=32) for _ in range(2)]
    captured[0].fill(segments)
    captured[1].fill(segments)  # has memory of its own
    assert device.notes == ["plan", "record"] * 2
    captured[0].fill(segments)
    assert device.notes[4:] == ["wait", "plan", "record"]


def test_forwards_that_are_not_captured_wait_likewise(attention: FlashInferAttention, device: Device) -> None:
    segments = batch(np.random.default_rng(0), [(5, 2, "causal")], np.arange(SLOTS))
    for _ in range(2):
        plan = attention.plan(segments)
        for layer in (0, 0):  # planned once for all
            attention.attend(plan, layer, torch.zeros(2, 2 * HEADS, DIM, dtype=torch.float16))
    assert device.notes == ["plan", "record", "wait", "plan", "record"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 32, 128), (32, 8, 128), (64, 8, 128), (40, 40, 128)]
)
def test_what_is_captured_beforehand_has_the_workspace_it_needs(heads: int, kv_heads: int, dim: int) -> None:
    for counts in usual_batches(is_rectangle=True):
        assert workspace_bytes(len(counts), sum(counts), heads, kv_heads, dim) <= WORKSPACE_BYTES


def test_workspaces_are_counted_as_flashinfer_counts_them(attention: FlashInferAttention) -> None:
    assert workspace_bytes(64, 512, 32, 32, 128) == (4 + 63) * 128 * 32 * 129 * 4
    assert workspace_bytes(1, 1, 32, 8, 128) == 16 * 32 * 129 * 4
    assert has_workspace(attention, Shape(64, 8, 0), 32)
    assert not has_workspace(attention, Shape(256, 2, 0), 64)  # is forwarded without being captured
