"""Attention in Triton over keys where they lie.

Imported only where it is launched, since it imports Triton (see `engine.row_kernels`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.row_kernels import inverse_root, rotated

# Compiled once for every model, whatever the batch: of what differs between batches nothing is assumed.
_OF_THE_BATCH = ("num_rows", "num_splits", "num_segments")


@triton.jit
def _visible(column, is_key, row, is_real, seen, first_seen, columns):
    """Whether rows see keys, `column` behind those that all rows see; see `SegmentTable`."""
    if first_seen < 0:
        visible = column[None, :] <= row[:, None]
    else:
        seen_at = seen + first_seen + row[:, None] * columns + column[None, :]
        is_column = (column >= 0) & is_key
        bit = tl.load(seen_at, mask=is_real[:, None] & is_column[None, :], other=0)
        visible = (column < 0)[None, :] | (bit != 0)
    return visible & is_key[None, :] & is_real[:, None]


@triton.jit
def _capped(score, cap):
    """Scores bounded by `cap`, both times log2(e): cap * tanh(score / cap)."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp2(score / cap * 2.8853900817779268)))


@triton.jit
def _tile_at(number, segments, num_segments, SHARED: tl.constexpr, QUERIES: tl.constexpr):
    """A tile's segment and number among its tiles, of which it may not have so many.

    Tiles of segment i are numbered from first row * SHARED // QUERIES + i on: what is left for it is enough,
    and one number at most too many. So nobody has to count tiles, and long prompts among short rows take no
    programs from these.
    """
    low = number * 0
    high = low + num_segments
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(segments + middle * 7) * SHARED // QUERIES + middle <= number:
            low = middle
        else:
            high = middle
    first = tl.load(segments + low * 7) * SHARED // QUERIES + low
    return low, number - first


@triton.jit(do_not_specialize=_OF_THE_BATCH, do_not_specialize_on_alignment=("slots", "seen"))
def attend(
    q,
    rotation,
    x,
    storage,
    out,
    partial,
    weight,
    segments,
    slots,
    seen,
    scale,
    q_row_stride,
    q_head_stride,
    storage_stride,
    num_rows,
    num_splits,
    num_segments,
    x_stride,
    size,
    eps,
    positions,
    sinks,
    window,
    cap,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_TILED: tl.constexpr,
    IS_NEW: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Attention of one tile of a segment's queries over one split of its keys, for one key head.

    Queries are rows times the query heads that share the key head, row by row. Softmax as it goes along the
    keys (FlashAttention-2, arXiv 2307.08691, algorithm 1); splits are weighed by `combine` (Flash-Decoding).
    Grid: (tiles * KV_HEADS, splits, 1). Tiles are segments, or if IS_TILED numbered as `_tile_at` says.

    q [rows, KV_HEADS * SHARED, K_DIM]; storage [slots, KV_HEADS * (K_DIM + V_DIM)]; out, of q's type,
    [rows, KV_HEADS * SHARED * V_DIM], or if IS_SPLIT partial, float32 [splits, rows, heads, V_DIM], and
    weight, float32 [splits, rows, heads], base-2 logarithms of the softmaxes' denominators. segments, slots,
    seen: see `SegmentTable`. scale: of scores, times log2(e). K_BLOCK, V_BLOCK: next powers of two.

    If IS_NEW, segments have one row each, whose key is their last, and q is where a row's query, key and
    value heads lie behind one another as a product has left them: they are rotated here, and key and value
    stored, as by `rotate_and_store`, whose rotation, x, size, eps and NORM_BLOCK these are.

    If HAS_WINDOW, rows see keys of the last `window` positions only; a segment's keys that all its rows see
    are at positions 0, 1, ..., and positions int32 [rows] are those of rows. If HAS_SINKS, sinks [heads] are
    scores, unscaled, that take their share of the softmax and give nothing; if HAS_CAP, scores are `_capped`.
    None of these with IS_NEW.
    """
    segment = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    tile = tl.program_id(2)  # 0, which the compiler must not know: it would take more registers
    if IS_TILED:
        segment, tile = _tile_at(segment, segments, num_segments, SHARED, QUERIES)
    start_query = tile * QUERIES
    about = segments + segment * 7
    first_row = tl.load(about)
    rows = tl.load(about + 1)
    first_key = tl.load(about + 2)
    keys = tl.load(about + 3)
    committed = tl.load(about + 4)
    first_seen = tl.load(about + 5)
    columns = tl.load(about + 6)
    if start_query >= rows * SHARED:
        return

    query = start_query + tl.arange(0, QUERIES)
    row = query // SHARED
    query_head = head * SHARED + query % SHARED
    is_real = row < rows
    k_unit = tl.arange(0, K_BLOCK)
    v_unit = tl.arange(0, V_BLOCK)
    batch_row = (first_row + row).to(tl.int64)
    q_from = q + batch_row[:, None] * q_row_stride + query_head[:, None] * q_head_stride
    is_asked = is_real[:, None] & (k_unit < K_DIM)[None, :]
    by = 1.0
    if NORM_BLOCK > 0:
        by = inverse_root(x + first_row.to(tl.int64) * x_stride, size, eps, NORM_BLOCK)
    if IS_NEW:
        turn = rotation + first_row.to(tl.int64) * K_DIM
        is_unit = k_unit < K_DIM
        asked = rotated(q_from, k_unit[None, :], is_asked, turn, is_unit[None, :], by, NORM_BLOCK > 0)
    else:
        asked = tl.load(q_from + k_unit[None, :], mask=is_asked, other=0.0)

    # Of this split's keys, none behind the last that a causal tile sees.
    past = keys - 1 if IS_NEW else keys
    if HAS_WINDOW:
        # Without a branch: behind one the compiler would keep no loads of keys under way.
        is_told = tl.where(first_seen < 0, rows, row) < rows
        told = tl.load(positions + batch_row, mask=is_told, other=0)
        low = tl.maximum(tl.where(first_seen < 0, committed + row, told) - window + 1, 0)
        lowest = tl.min(tl.where(is_real, low, past), 0)
        length = tl.cdiv(tl.cdiv(past - lowest, num_splits), KEYS) * KEYS
        begin = lowest + split * length
    else:
        length = tl.cdiv(tl.cdiv(past, num_splits), KEYS) * KEYS
        begin = split * length
    end = tl.minimum(past, begin + length)
    if first_seen < 0:
        last_row = tl.minimum(rows, (start_query + QUERIES - 1) // SHARED + 1)
        end = tl.minimum(end, committed + last_row)

    highest = tl.full([QUERIES], -float("inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    mixed = tl.zeros([QUERIES, V_BLOCK], dtype=tl.float32)
    k_from = storage + head * K_DIM + k_unit
    v_from = storage + KV_HEADS * K_DIM + head * V_DIM + v_unit
    if IS_NEW:
        # First, where the fewest registers are taken. A row of nobody (`MovingRows`) brings no key.
        brings_key = (split == num_splits - 1) & (past >= 0)
        if brings_key:
            slot = tl.load(slots + first_key + past).to(tl.int64)
            k_new = q + first_row.to(tl.int64) * q_row_stride + (KV_HEADS * SHARED + head) * K_DIM
            k = rotated(k_new, k_unit, is_unit, turn, is_unit, by, NORM_BLOCK > 0)
            tl.store(k_from + slot * storage_stride, k, mask=is_unit)
            v = tl.load(k_new + KV_HEADS * K_DIM + v_unit, mask=v_unit < V_DIM, other=0.0)
            if NORM_BLOCK > 0:
                v = (v.to(tl.float32) * by).to(v.dtype)
            tl.store(v_from + slot * storage_stride, v, mask=v_unit < V_DIM)
            highest = tl.sum(asked.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
            total += 1.0
            mixed += v.to(tl.float32)[None, :]
    # Most keys are in whole tiles that all rows see, which need no masks: none before a window's beginning.
    whole = begin
    if HAS_WINDOW:
        whole += tl.cdiv(tl.maximum(tl.max(tl.where(is_real, low, 0), 0) - begin, 0), KEYS) * KEYS
    masked = whole + tl.maximum(tl.minimum(end, committed) - whole, 0) // KEYS * KEYS
    for start_key in range(whole, masked, KEYS):
        slot = tl.load(slots + first_key + start_key + tl.arange(0, KEYS)).to(tl.int64)
        k_at = k_from[:, None] + slot[None, :] * storage_stride
        k = tl.load(k_at, mask=(k_unit < K_DIM)[:, None], other=0.0)
        score = tl.dot(asked, k, input_precision="ieee") * scale
        if HAS_CAP:
            score = _capped(score, cap)
        higher = tl.maximum(highest, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(share, 1)
        v_at = v_from[None, :] + slot[:, None] * storage_stride
        v = tl.load(v_at, mask=(v_unit < V_DIM)[None, :], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        highest = higher
    for start in range(masked - (whole - begin), end, KEYS):
        start_key = start
        if HAS_WINDOW:
            start_key = tl.where(start < masked, start - masked + whole, start)
        key = start_key + tl.arange(0, KEYS)
        is_key = key < end
        slot = tl.load(slots + first_key + key, mask=is_key, other=0).to(tl.int64)
        k_at = k_from[:, None] + slot[None, :] * storage_stride
        k = tl.load(k_at, mask=is_key[None, :] & (k_unit < K_DIM)[:, None], other=0.0)
        score = tl.dot(asked, k, input_precision="ieee") * scale
        if HAS_CAP:
            score = _capped(score, cap)
        visible = _visible(key - committed, is_key, row, is_real, seen, first_seen, columns)
        if HAS_WINDOW:
            visible &= key[None, :] >= low[:, None]
        score = tl.where(visible, score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        # A row that has seen no key yet has no highest score to subtract.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        share = tl.exp2(score - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(share, 1)
        v_at = v_from[None, :] + slot[:, None] * storage_stride
        v = tl.load(v_at, mask=is_key[:, None] & (v_unit < V_DIM)[None, :], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        highest = higher

    if HAS_SINKS:
        # Of one split; minus infinity is none.
        sink = tl.load(sinks + query_head).to(tl.float32) * 1.4426950408889634
        sink = tl.where(split == 0, sink, -float("inf"))
        higher = tl.maximum(highest, sink)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        fade = tl.exp2(highest - base)
        total = total * fade + tl.exp2(sink - base)
        mixed *= fade[:, None]
        highest = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    at = batch_row * (KV_HEADS * SHARED) + query_head
    is_mixed = is_real[:, None] & (v_unit < V_DIM)[None, :]
    if IS_SPLIT:
        line = split.to(tl.int64) * num_rows * (KV_HEADS * SHARED) + at
        tl.store(weight + line, highest + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=is_real)
        tl.store(partial + line[:, None] * V_DIM + v_unit[None, :], mixed, mask=is_mixed)
    else:
        tl.store(out + at[:, None] * V_DIM + v_unit[None, :], mixed.to(out.dtype.element_ty), mask=is_mixed)


@triton.jit(do_not_specialize=("num_splits", "num_lines"))
def combine(
    partial,
    weight,
    out,
    num_lines,
    num_splits,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The splits' results of one row and head, weighed by their shares of the softmax's denominator.

    Grid: (rows * heads,). partial float32 [splits, lines, V_DIM], weight float32 [splits, lines], where a
    line is a row and a head; out [lines, V_DIM]. SPLITS: a power of two that holds all splits.
    """
    line = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    unit = tl.arange(0, V_BLOCK)
    is_split = split < num_splits
    logs = tl.load(weight + split * num_lines + line, mask=is_split, other=-float("inf"))
    highest = tl.max(logs, 0)
    share = tl.exp2(logs - tl.where(highest == -float("inf"), 0.0, highest))
    at = partial + (split[:, None] * num_lines + line) * V_DIM + unit[None, :]
    is_unit = is_split[:, None] & (unit < V_DIM)[None, :]
    mixed = tl.sum(tl.load(at, mask=is_unit, other=0.0) * share[:, None], 0)
    total = tl.sum(share, 0)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    tl.store(out + line * V_DIM + unit, mixed.to(out.dtype.element_ty), mask=unit < V_DIM)


@triton.jit(do_not_specialize=("rows", "laid_out", "columns"))
def see(segments, committed, laid, seen, rows, laid_out, columns, BYTES: tl.constexpr):
    """Put into a batch's table what the rows of trees see, where the device says it.

    Grid: (segments,). segments, seen: see `SegmentTable`. committed int64 [segments], keys before those with
    a mask; laid uint8 [segments, laid_out, columns], the mask, of which a segment's first `rows` count. Where
    `rows` are more than were laid out the others are padding, which sees none of these.
    """
    segment = tl.program_id(0).to(tl.int64)
    about = segments + segment * 7
    size = rows * columns
    laid_size = tl.minimum(rows, laid_out) * columns
    tl.store(about + 4, tl.load(committed + segment).to(tl.int32))
    tl.store(about + 5, (segment * size).to(tl.int32))
    tl.store(about + 6, columns)
    for start in range(0, size, BYTES):
        place = start + tl.arange(0, BYTES)
        is_byte = place < size
        bits = tl.load(laid + segment * laid_out * columns + place, mask=place < laid_size, other=0)
        tl.store(seen + segment * size + place, bits, mask=is_byte)
