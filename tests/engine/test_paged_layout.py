"""Index arrays and masks for FlashInfer, read as its documentation says, against the dense computation."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.paged_layout import PagedLayout, paged_layout, split_by_mask, without_mask
from engine.runner import Segment
from tests.engine.test_attention import NUM_SLOTS, dense, random_segment
from tests.examples import examples

SHAPES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 7), st.sampled_from(["causal", "tree", "wide"])),
    min_size=1,
    max_size=5,
)


def make(shapes: list[tuple[int, int, str]], seed: int) -> list[Segment]:
    rng = np.random.default_rng(seed)
    slots, used, segments = rng.permutation(NUM_SLOTS).astype(np.int32), 0, []
    for past, rows, kind in shapes:
        segments.append(random_segment(rng, slots[used : used + past + rows], past, rows, kind))
        used += past + rows
    return segments


def unpack(layout: PagedLayout, packed: np.ndarray | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per request: slots of its keys, and which of them each row sees.

    A mask is read as the kernel does: a request's begins with a byte, rows of keys, lowest bit first.
    """
    found = []
    byte = 0
    for request in range(len(layout.last_page_len)):
        rows = int(layout.qo_indptr[request + 1] - layout.qo_indptr[request])
        slots = layout.kv_indices[layout.kv_indptr[request] : layout.kv_indptr[request + 1]]
        keys = len(slots)
        if packed is None:
            # Causal masking is aligned at the last key.
            seen = np.arange(keys) <= np.arange(keys - rows, keys)[:, None]
        else:
            size = -(-rows * keys // 8)
            bits = np.unpackbits(packed[byte : byte + size], bitorder="little")
            seen = bits[: rows * keys].reshape(rows, keys).astype(bool)
            byte += size
        found.append((slots, seen))
    return found


def packed_per_request(layout: PagedLayout) -> np.ndarray | None:
    """What FlashInfer's `segment_packbits` makes of the mask."""
    if layout.mask is None:
        return None
    sizes = np.diff(layout.qo_indptr) * np.diff(layout.kv_indptr)
    parts = np.split(layout.mask, np.cumsum(sizes)[:-1])
    return np.concatenate([np.packbits(part, bitorder="little") for part in parts])


@examples(40)
@given(shapes=SHAPES, padding=st.integers(0, 3), masked=st.booleans(), seed=st.integers(0, 500))
def test_the_layout_says_what_each_row_sees(
    shapes: list[tuple[int, int, str]], padding: int, masked: bool, seed: int
) -> None:
    segments = make(shapes, seed)
    rows = max(len(s.slots) for s in segments) + padding if padding else None
    layout = paged_layout(segments, rows, masked=masked)
    assert layout.last_page_len.tolist() == [1] * len(segments)
    torch.manual_seed(seed)
    keys, values = torch.randn(NUM_SLOTS, 2, 8), torch.randn(NUM_SLOTS, 2, 8)
    for segment, (slots, seen) in zip(segments, unpack(layout, packed_per_request(layout)), strict=True):
        own = len(segment.slots)
        q = torch.randn(own, 2, 8)
        assert len(seen) == (rows or own)
        assert seen.any(axis=1).all()  # a row that sees nothing has no result
        out = torch.stack(
            [
                torch.softmax(keys[slots[s], head] @ q[row, head] * 0.3, 0) @ values[slots[s], head]
                for row, s in enumerate(seen[:own])
                for head in range(2)
            ]
        )
        expected = dense(segment, keys, values, q, 0.3)
        torch.testing.assert_close(out.view(own, 2, 8), expected, atol=1e-5, rtol=1e-4)


@examples(60)
@given(shapes=SHAPES, seed=st.integers(0, 500))
def test_single_rows_need_no_mask(shapes: list[tuple[int, int, str]], seed: int) -> None:
    """What they see becomes all their keys; so they are causal for every kernel, also a captured one."""
    segments = make(shapes, seed)
    torch.manual_seed(seed)
    keys, values = torch.randn(NUM_SLOTS, 2, 8), torch.randn(NUM_SLOTS, 2, 8)
    simpler = [without_mask(segment) for segment in segments]
    for segment, simple in zip(segments, simpler, strict=True):
        q = torch.randn(len(segment.slots), 2, 8)
        torch.testing.assert_close(
            dense(simple, keys, values, q, 0.3), dense(segment, keys, values, q, 0.3), atol=1e-5, rtol=1e-4
        )
        assert simple.slots.tolist() == segment.slots.tolist()
    causal, masked = split_by_mask(simpler)
    assert sorted(causal + masked) == list(range(len(segments)))
    assert causal == [i for i, s in enumerate(segments) if s.visible is None or len(s.slots) == 1]
    if causal:
        assert paged_layout([simpler[i] for i in causal]).mask is None
