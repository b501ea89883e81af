"""Kernels in Triton: products of rows with weights of eight bits.

Imported only where they are launched, since it imports Triton, which comes with CUDA builds of torch.
With TRITON_INTERPRET=1 set before, Triton runs them on a CPU, operation by operation in numpy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.product_kernels import store_tile


@triton.jit
def widened(bits, IS_NATIVE: tl.constexpr):
    """What bits of e4m3 numbers, uint8, are as float32; IS_NATIVE: see `multiply`."""
    if IS_NATIVE:
        wide = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # Its sign, exponent and fraction where float32 has them: the number times 2^-120.
        moved = (bits.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
        wide = moved.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return wide


@triton.jit(do_not_specialize=("num_rows", "split_blocks"))
def multiply(
    x,
    numbers,
    scales,
    bias,
    residual,
    out,
    num_rows,
    outputs,
    inputs,
    x_stride,
    split_blocks,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_NATIVE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """A tile of outputs for a tile of rows, over all inputs or one split of them.

    Weights are the left operand, so that they are widened in the registers they are multiplied from. Grid:
    (tiles of rows, tiles of outputs, splits): tiles of the same weights run next to each other.

    x [num_rows, inputs], x_stride numbers from row to row; numbers uint8 [outputs, inputs], bits of e4m3;
    scales float32 [outputs / GROUP, blocks], one per INPUTS inputs if IS_BLOCKED, else one; bias [outputs];
    residual [num_rows, outputs]; out, of x's type, [num_rows, outputs], or if IS_SPLIT float32
    [splits, num_rows, outputs], sums without bias and residual. split_blocks: tiles of inputs per split.
    IS_NATIVE: the device converts e4m3 itself (compute capability 8.9).
    """
    unit = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_unit = unit < outputs
    is_row = row < num_rows
    blocks = tl.cdiv(inputs, INPUTS)
    first = tl.program_id(2) * split_blocks
    place = first * INPUTS + tl.arange(0, INPUTS)
    numbers_at = numbers + unit[:, None].to(tl.int64) * inputs
    x_at = x + row[None, :].to(tl.int64) * x_stride
    scales_at = scales + (unit // GROUP) * (blocks if IS_BLOCKED else 1)

    total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for block in range(first, tl.minimum(first + split_blocks, blocks)):
        is_input = place < inputs
        bits = tl.load(numbers_at + place[None, :], mask=is_unit[:, None] & is_input[None, :], other=0)
        given = tl.load(x_at + place[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
        weight = widened(bits, IS_NATIVE).to(x.dtype.element_ty)
        if IS_BLOCKED:
            scale = tl.load(scales_at + block, mask=is_unit, other=0.0)
            total += tl.dot(weight, given, input_precision="ieee") * scale[:, None]
        else:
            total = tl.dot(weight, given, total, input_precision="ieee")
        place += INPUTS
    if not IS_BLOCKED:
        total *= tl.load(scales_at, mask=is_unit, other=0.0)[:, None]

    store_tile(total, bias, residual, out, unit, row, num_rows, outputs, IS_SPLIT, HAS_BIAS, HAS_RESIDUAL)
