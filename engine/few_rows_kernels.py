"""Kernels in Triton: products of a few rows with weights, with the norm before and the gate behind.

Imported only where they are launched, since it imports Triton, which comes with CUDA builds of torch.
With TRITON_INTERPRET=1 set before, Triton runs them on a CPU, operation by operation in numpy.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("num_rows", "split_blocks"))
def multiply(
    x,
    weight,
    bias,
    residual,
    out,
    partial,
    squares,
    counters,
    num_rows,
    outputs,
    inputs,
    x_stride,
    split_blocks,
    eps,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """A tile of outputs for all rows, over all inputs or one split of them; who is last adds up the splits.

    Grid: (tiles of outputs, SPLITS). x [num_rows, inputs], x_stride numbers from row to row; weight
    [outputs, inputs], or if IS_GATED [2 * outputs, inputs], gates first, and `out` is SiLU of gates times
    what they gate; bias [outputs] and residual [num_rows, outputs], not if IS_GATED; out [num_rows, outputs].
    If IS_NORMED rows are divided by their root mean square, `eps` added to its square, after the product,
    with which it commutes.

    Of splits: partial float32 [SPLITS, 1 or 2, num_rows, outputs]; squares float32 [tiles, SPLITS, ROWS];
    counters int32 [tiles], zeros, which are zeros again afterwards. split_blocks: tiles of inputs per split.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    unit = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_unit = unit < outputs
    is_row = row < num_rows
    first = split * split_blocks
    place = first * INPUTS + tl.arange(0, INPUTS)
    weight_at = weight + unit[:, None].to(tl.int64) * inputs
    gated_at = weight_at + outputs.to(tl.int64) * inputs
    x_at = x + row[None, :] * x_stride

    total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    gated = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    square = tl.zeros([ROWS], dtype=tl.float32)
    for _ in range(first, tl.minimum(first + split_blocks, tl.cdiv(inputs, INPUTS))):
        is_input = place < inputs
        is_weight = is_unit[:, None] & is_input[None, :]
        given = tl.load(x_at + place[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
        numbers = tl.load(weight_at + place[None, :], mask=is_weight, other=0.0)
        total = tl.dot(numbers, given, total)
        if IS_GATED:
            others = tl.load(gated_at + place[None, :], mask=is_weight, other=0.0)
            gated = tl.dot(others, given, gated)
        if IS_NORMED:
            wide = given.to(tl.float32)
            square += tl.sum(wide * wide, 0)
        place += INPUTS

    at = row[None, :] * outputs + unit[:, None]
    is_real = is_unit[:, None] & is_row[None, :]
    is_last = True
    if SPLITS > 1:
        size = num_rows * outputs
        halves = 2 if IS_GATED else 1
        part = partial + split * halves * size + at
        tl.store(part, total, mask=is_real)
        if IS_GATED:
            tl.store(part + size, gated, mask=is_real)
        if IS_NORMED:
            tl.store(squares + (tile * SPLITS + split) * ROWS + row, square)
        tl.debug_barrier()  # all of it is written before this program counts as done
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            # In one order, whoever is last. Past the first cache, which knows nothing of other processors.
            total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
            gated = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
            square = tl.zeros([ROWS], dtype=tl.float32)
            for one in tl.static_range(SPLITS):
                part = partial + one * halves * size + at
                total += tl.load(part, mask=is_real, other=0.0, cache_modifier=".cg")
                if IS_GATED:
                    gated += tl.load(part + size, mask=is_real, other=0.0, cache_modifier=".cg")
                if IS_NORMED:
                    found = squares + (tile * SPLITS + one) * ROWS + row
                    square += tl.load(found, cache_modifier=".cg")
            tl.store(counters + tile, 0)

    if is_last:
        if IS_NORMED:
            scale = tl.rsqrt(square / inputs + eps)[None, :]
            total *= scale
            gated *= scale
        if IS_GATED:
            total *= tl.sigmoid(total) * gated
        if HAS_BIAS:
            total += tl.load(bias + unit, mask=is_unit, other=0.0).to(tl.float32)[:, None]
        if HAS_RESIDUAL:
            total += tl.load(residual + at, mask=is_real, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=is_real)


@triton.jit
def normalise(x, gain, out, size, x_stride, eps, BLOCK: tl.constexpr, HAS_GAIN: tl.constexpr):
    """Rows divided by their root mean square, times `gain`.

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
