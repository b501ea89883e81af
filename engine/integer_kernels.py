"""Kernels in Triton: products of rows with weights of integers.

Imported only where they are launched, since it imports Triton, which comes with CUDA builds of torch.
With TRITON_INTERPRET=1 set before, Triton runs them on a CPU, operation by operation in numpy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.product_kernels import store_tile


def _halves_of_bytes(exponent: str, kind: str, one: str) -> str:
    """Code for four bytes, $4, of two numbers each: the lower ones in $0 and $1, the upper ones in $2 and $3.

    A number becomes the last digits of a float of 16 bits whose other byte is `exponent`, to which $5 (and
    for the third and fourth byte $6) is added: less what that float is without the number, and its zero.
    """
    return f"""{{
        .reg .b32 lower, upper, one;
        mov.b32 one, {one};
        and.b32 lower, $4, 0x0F0F0F0F;
        shr.u32 upper, $4, 4;
        and.b32 upper, upper, 0x0F0F0F0F;
        prmt.b32 $0, lower, {exponent}, 0x4140;
        prmt.b32 $1, lower, {exponent}, 0x4342;
        prmt.b32 $2, upper, {exponent}, 0x4140;
        prmt.b32 $3, upper, {exponent}, 0x4342;
        fma.rn.{kind} $0, $0, one, $5;
        fma.rn.{kind} $1, $1, one, $6;
        fma.rn.{kind} $2, $2, one, $5;
        fma.rn.{kind} $3, $3, one, $6;
    }}"""


#: 128 and the number in bfloat16; 1024 and the number in float16.
TO_BFLOAT16 = tl.constexpr(_halves_of_bytes("0x43434343", "bf16x2", "0x3F803F80"))
TO_FLOAT16 = tl.constexpr(_halves_of_bytes("0x64646464", "f16x2", "0x3C003C00"))
# Written before all that is given has been read.
REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")


@triton.jit
def _two_widened(numbers, zeros, kind: tl.constexpr):
    """What the lower and the upper four bits of bytes are beyond their zeros, in bfloat16 or float16."""
    if kind == tl.float16:
        _, added = tl.broadcast(numbers, (-1024.0 - zeros.to(tl.float32)).to(tl.float16))
        pair = tl.inline_asm_elementwise(
            TO_FLOAT16, REGISTERS, [numbers, added], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        _, added = tl.broadcast(numbers, (-128.0 - zeros.to(tl.float32)).to(tl.bfloat16))
        pair = tl.inline_asm_elementwise(
            TO_BFLOAT16, REGISTERS, [numbers, added], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return pair


@triton.jit
def _widened(numbers, zeros):
    """What integers of at most eight bits are beyond their zeros, in float32."""
    # 2^23 and the number: a conversion would be a slow instruction per weight, this is none.
    return (numbers.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (
        zeros.to(tl.float32) + 8388608.0
    )


@triton.jit(do_not_specialize=("num_rows", "split_blocks"))
def multiply(
    x,
    numbers,
    scales,
    zeros,
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
    BITS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """A tile of outputs for a tile of rows, over all inputs or one split of them.

    Weights are the left operand, so that they are widened in the registers they are multiplied from. Grid:
    (tiles of rows, tiles of outputs, splits): tiles of the same weights run next to each other.

    x [num_rows, inputs], x_stride numbers from row to row; numbers uint8 [outputs, blocks, INPUTS * BITS / 8]
    as `IntegerWeight` has them; scales float32 and zeros uint8 [outputs, blocks]; bias [outputs]; residual
    [num_rows, outputs]; out, of x's type, [num_rows, outputs], or if IS_SPLIT float32
    [splits, num_rows, outputs], sums without bias and residual. split_blocks: blocks per split.
    """
    BYTES: tl.constexpr = INPUTS * BITS // 8
    unit = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_unit = unit < outputs
    is_row = row < num_rows
    blocks = tl.cdiv(inputs, INPUTS)
    first = tl.program_id(2) * split_blocks
    byte = tl.arange(0, BYTES)
    place = first * INPUTS + byte
    numbers_at = numbers + (unit[:, None].to(tl.int64) * blocks + first) * BYTES + byte[None, :]
    x_at = x + row[None, :].to(tl.int64) * x_stride
    blocks_at = unit * blocks

    total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for block in range(first, tl.minimum(first + split_blocks, blocks)):
        bits = tl.load(numbers_at, mask=is_unit[:, None], other=0)
        scale = tl.load(scales + blocks_at + block, mask=is_unit, other=0.0)
        zero = tl.load(zeros + blocks_at + block, mask=is_unit, other=0)[:, None]
        given = tl.load(x_at + place[:, None], mask=(place < inputs)[:, None] & is_row[None, :], other=0.0)
        if BITS == 4:
            beyond = place + BYTES
            more = tl.load(
                x_at + beyond[:, None], mask=(beyond < inputs)[:, None] & is_row[None, :], other=0.0
            )
            if IS_PACKED:
                lower, upper = _two_widened(bits, zero, x.dtype.element_ty)
            else:
                lower = _widened(bits & 15, zero).to(x.dtype.element_ty)
                upper = _widened(bits >> 4, zero).to(x.dtype.element_ty)
            product = tl.dot(
                upper, more, tl.dot(lower, given, input_precision="ieee"), input_precision="ieee"
            )
        else:
            product = tl.dot(_widened(bits, zero).to(x.dtype.element_ty), given, input_precision="ieee")
        total += product * scale[:, None]
        numbers_at += BYTES
        place += INPUTS

    store_tile(total, bias, residual, out, unit, row, num_rows, outputs, IS_SPLIT, HAS_BIAS, HAS_RESIDUAL)
