"""Kernels in Triton: attention over keys where they lie, rotary embedding with their store, norms, gating.

Imported only where they are launched, since it imports Triton, which comes with CUDA builds of torch.
With TRITON_INTERPRET=1 set before, Triton runs them on a CPU, operation by operation in numpy.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Compiled once for every model, whatever the batch: of what differs between batches nothing is assumed.
_OF_THE_BATCH = ("num_rows", "num_splits", "num_segments")


@triton.jit
def _inverse_root(x, size, eps, BLOCK: tl.constexpr):
    """One over the root of a row's mean square plus `eps`; BLOCK: a power of two that holds `size`."""
    place = tl.arange(0, BLOCK)
    wide = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)


@triton.jit
def _rotated(head, unit, is_there, turn, is_turn, by, IS_NORMED: tl.constexpr):
    """Numbers `unit` of heads, times `by` if IS_NORMED, rotated with their neighbours.

    head, turn: where each one's head, and its row of `rotation` (see `rotate_and_store`), begin.
    """
    mine = tl.load(head + unit, mask=is_there, other=0.0)
    other = tl.load(head + (unit ^ 1), mask=is_there, other=0.0)
    if IS_NORMED:
        mine = (mine.to(tl.float32) * by).to(mine.dtype)
        other = (other.to(tl.float32) * by).to(other.dtype)
    cosine = tl.load(turn + unit // 2 * 2, mask=is_turn, other=0.0)
    sine = tl.load(turn + unit // 2 * 2 + 1, mask=is_turn, other=0.0)
    turned = tl.where(unit % 2 == 0, -sine, sine)
    return (mine.to(tl.float32) * cosine + other.to(tl.float32) * turned).to(mine.dtype)


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
        by = _inverse_root(x + first_row.to(tl.int64) * x_stride, size, eps, NORM_BLOCK)
    if IS_NEW:
        turn = rotation + first_row.to(tl.int64) * K_DIM
        is_unit = k_unit < K_DIM
        asked = _rotated(q_from, k_unit[None, :], is_asked, turn, is_unit[None, :], by, NORM_BLOCK > 0)
    else:
        asked = tl.load(q_from + k_unit[None, :], mask=is_asked, other=0.0)

    # Of this split's keys, none behind the last that a causal tile sees.
    past = keys - 1 if IS_NEW else keys
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
            k = _rotated(k_new, k_unit, is_unit, turn, is_unit, by, NORM_BLOCK > 0)
            tl.store(k_from + slot * storage_stride, k, mask=is_unit)
            v = tl.load(k_new + KV_HEADS * K_DIM + v_unit, mask=v_unit < V_DIM, other=0.0)
            if NORM_BLOCK > 0:
                v = (v.to(tl.float32) * by).to(v.dtype)
            tl.store(v_from + slot * storage_stride, v, mask=v_unit < V_DIM)
            highest = tl.sum(asked.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
            total += 1.0
            mixed += v.to(tl.float32)[None, :]
    # Most keys are in whole tiles that all rows see, which need no masks.
    masked = begin + tl.maximum(tl.minimum(end, committed) - begin, 0) // KEYS * KEYS
    for start_key in range(begin, masked, KEYS):
        slot = tl.load(slots + first_key + start_key + tl.arange(0, KEYS)).to(tl.int64)
        k_at = k_from[:, None] + slot[None, :] * storage_stride
        k = tl.load(k_at, mask=(k_unit < K_DIM)[:, None], other=0.0)
        score = tl.dot(asked, k, input_precision="ieee") * scale
        higher = tl.maximum(highest, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(share, 1)
        v_at = v_from[None, :] + slot[:, None] * storage_stride
        v = tl.load(v_at, mask=(v_unit < V_DIM)[None, :], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        highest = higher
    for start_key in range(masked, end, KEYS):
        key = start_key + tl.arange(0, KEYS)
        is_key = key < end
        slot = tl.load(slots + first_key + key, mask=is_key, other=0).to(tl.int64)
        k_at = k_from[:, None] + slot[None, :] * storage_stride
        k = tl.load(k_at, mask=is_key[None, :] & (k_unit < K_DIM)[:, None], other=0.0)
        score = tl.dot(asked, k, input_precision="ieee") * scale
        visible = _visible(key - committed, is_key, row, is_real, seen, first_seen, columns)
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


@triton.jit
def rotate_and_store(
    qkv,
    rotation,
    storage,
    slots,
    qkv_stride,
    storage_stride,
    x,
    x_stride,
    size,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
):
    """Rotate one row's query or key head in place, and write a key or value head to the row's slot.

    Grid: (rows, HEADS + 2 * KV_HEADS). qkv [rows, (HEADS + 2 * KV_HEADS) * DIM]: query, key and value heads;
    rotation float32 [rows, DIM / 2, 2], cosine and sine of each pair of neighbours; storage
    [slots, 2 * KV_HEADS * DIM]; slots int64 [rows]. HALF_BLOCK: the next power of two of DIM / 2. NORM_BLOCK:
    0, or a power of two that holds `size` where qkv is to be divided as the norm of rows x [rows, size] is.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, HALF_BLOCK)
    is_pair = pair < DIM // 2
    at = qkv + row * qkv_stride + head * DIM + pair * 2
    real = tl.load(at, mask=is_pair, other=0.0)
    imaginary = tl.load(at + 1, mask=is_pair, other=0.0)
    if NORM_BLOCK > 0:
        by = _inverse_root(x + row * x_stride, size, eps, NORM_BLOCK)
        real = (real.to(tl.float32) * by).to(qkv.dtype.element_ty)
        imaginary = (imaginary.to(tl.float32) * by).to(qkv.dtype.element_ty)
    if head < HEADS + KV_HEADS:
        turn = rotation + row * DIM + pair * 2
        cosine = tl.load(turn, mask=is_pair, other=0.0)
        sine = tl.load(turn + 1, mask=is_pair, other=0.0)
        first, second = real.to(tl.float32), imaginary.to(tl.float32)
        real = (first * cosine - second * sine).to(qkv.dtype.element_ty)
        imaginary = (first * sine + second * cosine).to(qkv.dtype.element_ty)
    if head < HEADS:
        tl.store(at, real, mask=is_pair)
        tl.store(at + 1, imaginary, mask=is_pair)
    else:
        slot = tl.load(slots + row)
        there = storage + slot * storage_stride + (head - HEADS) * DIM + pair * 2
        tl.store(there, real, mask=is_pair)
        tl.store(there + 1, imaginary, mask=is_pair)


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


@triton.jit
def gate(
    gate_up,
    out,
    units,
    x,
    x_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
):
    """SiLU of gates times what they gate.

    Grid: (rows, ceil(units / BLOCK)). gate_up [rows, 2 * units], gates first; out [rows, units]. x, size and
    NORM_BLOCK as in `rotate_and_store`.
    """
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_unit = unit < units
    at = gate_up + row * 2 * units + unit
    gate = tl.load(at, mask=is_unit, other=0.0).to(tl.float32)
    up = tl.load(at + units, mask=is_unit, other=0.0).to(tl.float32)
    if NORM_BLOCK > 0:
        by = _inverse_root(x + row * x_stride, size, eps, NORM_BLOCK)
        gate *= by
        up *= by
    tl.store(out + row * units + unit, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=is_unit)


@triton.jit
def normalise(x, gain, out, size, x_stride, eps, BLOCK: tl.constexpr, HAS_GAIN: tl.constexpr):
    """Rows divided by the root of their mean square plus `eps`, times `gain`.

    Grid: (rows,). x [rows, size]; gain [size]; out [rows, size]. BLOCK: a power of two that holds `size`.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    is_place = place < size
    wide = tl.load(x + row * x_stride + place, mask=is_place, other=0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    if HAS_GAIN:
        wide *= tl.load(gain + place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + row * size + place, wide.to(out.dtype.element_ty), mask=is_place)
