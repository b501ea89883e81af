"""Kernels in Triton for the rows of a forward: rotary embedding with the store of keys, norms, gating.

Imported only where they are launched, since it imports Triton, which comes with CUDA builds of torch.
With TRITON_INTERPRET=1 set before, Triton runs them on a CPU, operation by operation in numpy.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_root(x, size, eps, BLOCK: tl.constexpr):
    """One over the root of a row's mean square plus `eps`; BLOCK: a power of two that holds `size`."""
    place = tl.arange(0, BLOCK)
    wide = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)


@triton.jit
def rotated(head, unit, is_there, turn, is_turn, by, IS_NORMED: tl.constexpr):
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
        by = inverse_root(x + row * x_stride, size, eps, NORM_BLOCK)
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
        by = inverse_root(x + row * x_stride, size, eps, NORM_BLOCK)
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
