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
    with which that commutes. ROWS: a power of two that holds num_rows.

    Of splits: partial float32 [SPLITS, 1 or 2, num_rows, outputs]; squares float32 [tiles, SPLITS, ROWS];
    counters int32 [tiles], zeros, which are zeros again afterwards. split_blocks: tiles of inputs per split.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # Of a gated product gates and what they gate are one tile of weights, the one above the other.
    LINES: tl.constexpr = OUTPUTS * 2 if IS_GATED else OUTPUTS
    line = tl.arange(0, LINES)
    unit = tile * OUTPUTS + line % OUTPUTS
    half = line // OUTPUTS
    row = tl.arange(0, ROWS)
    is_unit = unit < outputs
    is_row = row < num_rows
    first = split * split_blocks
    place = first * INPUTS + tl.arange(0, INPUTS)
    weight_at = weight + (unit + half * outputs)[:, None].to(tl.int64) * inputs
    x_at = x + row[None, :] * x_stride

    total = tl.zeros([LINES, ROWS], dtype=tl.float32)
    square = tl.zeros([ROWS], dtype=tl.float32)
    for _ in range(first, tl.minimum(first + split_blocks, tl.cdiv(inputs, INPUTS))):
        is_input = place < inputs
        given = tl.load(x_at + place[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
        numbers = tl.load(weight_at + place[None, :], mask=is_unit[:, None] & is_input[None, :], other=0.0)
        total = tl.dot(numbers, given, total)
        if IS_NORMED:
            wide = given.to(tl.float32)
            square += tl.sum(wide * wide, 0)
        place += INPUTS

    is_last = True
    if SPLITS > 1:
        size = num_rows * outputs
        part = partial + half[:, None] * size + row[None, :] * outputs + unit[:, None]
        is_part = is_unit[:, None] & is_row[None, :]
        step = size * (2 if IS_GATED else 1)
        tl.store(part + split * step, total, mask=is_part)
        if IS_NORMED:
            tl.store(squares + (tile * SPLITS + split) * ROWS + row, square)
        tl.debug_barrier()  # all of it is written before this program counts as done
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            # In one order, whoever is last. Past the first cache, which knows nothing of other processors.
            total = tl.zeros([LINES, ROWS], dtype=tl.float32)
            square = tl.zeros([ROWS], dtype=tl.float32)
            for one in tl.static_range(SPLITS):
                total += tl.load(part + one * step, mask=is_part, other=0.0, cache_modifier=".cg")
                if IS_NORMED:
                    there = squares + (tile * SPLITS + one) * ROWS + row
                    square += tl.load(there, cache_modifier=".cg")
            tl.store(counters + tile, 0)

    if is_last:
        if IS_NORMED:
            total *= tl.rsqrt(square / inputs + eps)[None, :]
        if IS_GATED:
            gate, up = tl.split(tl.permute(tl.reshape(total, [2, OUTPUTS, ROWS]), (1, 2, 0)))
            found = gate * tl.sigmoid(gate) * up
        else:
            found = total
        output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        at = row[None, :] * outputs + output[:, None]
        is_real = (output < outputs)[:, None] & is_row[None, :]
        if HAS_BIAS:
            found += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        if HAS_RESIDUAL:
            found += tl.load(residual + at, mask=is_real, other=0.0).to(tl.float32)
        tl.store(out + at, found.to(out.dtype.element_ty), mask=is_real)


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
