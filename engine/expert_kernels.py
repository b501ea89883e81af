"""Kernels in Triton for mixtures of experts: who is sent where, and what experts make of their rows.

Imported only where they are launched, since it imports Triton, which comes with CUDA builds of torch.
With TRITON_INTERPRET=1 set before, Triton runs them on a CPU, operation by operation in numpy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.fp8_kernels import widened


@triton.jit
def route(
    logits,
    chosen,
    weights,
    num_experts,
    PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    SUMS_TO_ONE: tl.constexpr,
):
    """Sends a row to the experts of the highest probabilities, of equal ones to the first.

    Grid: (rows,). logits [rows, num_experts]; chosen int32 and weights float32 [rows, PER_ROW]. EXPERTS: a
    power of two, at least num_experts.
    """
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    left = tl.load(logits + row * num_experts + expert, mask=expert < num_experts, other=float("-inf"))
    left = left.to(tl.float32)
    left = tl.exp(left - tl.max(left, 0))
    left = left / tl.sum(left, 0)
    left = tl.where(expert < num_experts, left, -1.0)
    total = 0.0
    for place in tl.static_range(PER_ROW):
        best = tl.argmax(left, 0, tie_break_left=True)
        weight = tl.max(left, 0)
        tl.store(chosen + row * PER_ROW + place, best)
        tl.store(weights + row * PER_ROW + place, weight)
        total += weight
        left = tl.where(expert == best, -1.0, left)
    if SUMS_TO_ONE:
        # A program reads again what its own threads have written, once all of them have.
        tl.debug_barrier()
        for place in tl.static_range(PER_ROW):
            at = weights + row * PER_ROW + place
            tl.store(at, tl.load(at) / total)


@triton.jit(do_not_specialize=("num_pairs",))
def group(chosen, order, pairs_until, num_pairs, PAIRS: tl.constexpr):
    """Puts pairs of a row and an expert into the order of experts, those of one in their own.

    Grid: (experts,). chosen int32 [num_pairs], experts' numbers; order int32 [num_pairs], pairs' numbers;
    pairs_until int32 [experts]: pairs of all experts up to this one. PAIRS: a power of two, at least
    num_pairs.
    """
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    own = tl.load(chosen + pair, mask=pair < num_pairs, other=2147483647)
    is_mine = (own == expert).to(tl.int32)
    first = tl.sum((own < expert).to(tl.int32), 0)
    tl.store(order + first + tl.cumsum(is_mine, 0) - 1, pair, mask=is_mine > 0)
    tl.store(pairs_until + expert, first + tl.sum(is_mine, 0))


@triton.jit
def pairs_of(block, order, pairs_until, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Of a block of pairs its expert, where they stand in the order, which of these there are, their numbers.

    No block has pairs of two experts. The expert is num_experts, or more, of blocks behind the last.
    """
    experts = tl.arange(0, EXPERTS)
    until = tl.load(pairs_until + experts, mask=experts < num_experts, other=0)
    before = tl.load(pairs_until + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    blocks = tl.where(experts < num_experts, (until - before + BLOCK - 1) // BLOCK, 0)
    blocks_until = tl.cumsum(blocks, 0)
    expert = tl.sum((blocks_until <= block).to(tl.int32), 0)
    is_it = experts == expert
    first_block = tl.sum(tl.where(is_it, blocks_until - blocks, 0), 0)
    place = tl.sum(tl.where(is_it, before, 0), 0) + (block - first_block) * BLOCK + tl.arange(0, BLOCK)
    is_pair = place < tl.sum(tl.where(is_it, until, 0), 0)
    return expert, place, is_pair, tl.load(order + place, mask=is_pair, other=0)


@triton.jit
def weights_at(at, is_there, like: tl.constexpr, GROUP: tl.constexpr, IS_NATIVE: tl.constexpr):
    """Weights of type `like`: as they are stored, or widened from e4m3 if GROUP."""
    if GROUP > 0:
        found = widened(tl.load(at, mask=is_there, other=0), IS_NATIVE).to(like)
    else:
        found = tl.load(at, mask=is_there, other=0.0)
    return found


@triton.jit
def plus_product(total, part, given, scales_at, is_output, GROUP: tl.constexpr, IS_BLOCKED: tl.constexpr):
    """`total` and the product of a tile of weights with rows, by the weights' scales if they have blocks."""
    if GROUP > 0 and IS_BLOCKED:
        scale = tl.load(scales_at, mask=is_output, other=0.0)
        total += tl.dot(part, given, input_precision="ieee") * scale[:, None]
    else:
        total = tl.dot(part, given, total, input_precision="ieee")
    return total


@triton.jit
def gate_and_up(
    x,
    matrices,
    scales,
    order,
    pairs_until,
    out,
    num_experts,
    units,
    inputs,
    x_stride,
    PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_NATIVE: tl.constexpr,
):
    """A tile of gated units of a block of pairs.

    Matrices are the left operand: few rows then leave no tensor core idle that many would keep busy. Grid:
    (blocks, tiles of units): blocks of one expert, which read the same weights, run next to each other.

    x [rows, inputs], x_stride numbers from row to row; matrices [num_experts, 2 * units, inputs], gates
    first: of x's type, or if GROUP bits of e4m3 numbers, uint8, of which GROUP neighbouring outputs share
    scales, float32 [num_experts, 2 * units / GROUP, blocks], one per INPUTS inputs if IS_BLOCKED, else one.
    IS_NATIVE: see `fp8_kernels.multiply`. order, pairs_until: see `group`; out [pairs, units], pairs in their
    order.
    """
    expert, place, is_pair, pair = pairs_of(tl.program_id(0), order, pairs_until, num_experts, BLOCK, EXPERTS)
    if expert < num_experts:
        unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
        is_unit = unit < units
        spot = tl.arange(0, INPUTS)
        matrix = matrices + expert.to(tl.int64) * 2 * units * inputs
        gate_at = matrix + unit[:, None].to(tl.int64) * inputs
        up_at = gate_at + units.to(tl.int64) * inputs
        x_at = x + (pair // PER_ROW)[None, :].to(tl.int64) * x_stride
        blocks = tl.cdiv(inputs, INPUTS) if IS_BLOCKED else 1
        output = expert * 2 * units + unit
        gate_scales = scales + output // GROUP * blocks if GROUP > 0 else scales
        up_scales = scales + (output + units) // GROUP * blocks if GROUP > 0 else scales
        gate = tl.zeros([UNITS, BLOCK], dtype=tl.float32)
        up = tl.zeros([UNITS, BLOCK], dtype=tl.float32)
        for first in range(0, inputs, INPUTS):
            at = first + spot
            is_input = at < inputs
            is_weight = is_unit[:, None] & is_input[None, :]
            given = tl.load(x_at + at[:, None], mask=is_input[:, None] & is_pair[None, :], other=0.0)
            gates = weights_at(gate_at + at[None, :], is_weight, x.dtype.element_ty, GROUP, IS_NATIVE)
            ups = weights_at(up_at + at[None, :], is_weight, x.dtype.element_ty, GROUP, IS_NATIVE)
            gate = plus_product(gate, gates, given, gate_scales + first // INPUTS, is_unit, GROUP, IS_BLOCKED)
            up = plus_product(up, ups, given, up_scales + first // INPUTS, is_unit, GROUP, IS_BLOCKED)
        if GROUP > 0 and not IS_BLOCKED:
            gate *= tl.load(gate_scales, mask=is_unit, other=0.0)[:, None]
            up *= tl.load(up_scales, mask=is_unit, other=0.0)[:, None]
        gated = gate / (1.0 + tl.exp(-gate)) * up
        there = out + place[None, :].to(tl.int64) * units + unit[:, None]
        tl.store(there, gated.to(out.dtype.element_ty), mask=is_unit[:, None] & is_pair[None, :])


@triton.jit
def down(
    x,
    matrices,
    scales,
    order,
    pairs_until,
    weights,
    out,
    num_experts,
    outputs,
    units,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_NATIVE: tl.constexpr,
):
    """A tile of outputs of a block of pairs, times what the expert counts for in the row.

    Grid: (blocks, tiles of outputs). x [pairs, units], pairs in their order; matrices
    [num_experts, outputs, units], scales and constants: see `gate_and_up`; weights float32 [pairs] and out
    [pairs, outputs] by pairs' numbers.
    """
    expert, place, is_pair, pair = pairs_of(tl.program_id(0), order, pairs_until, num_experts, BLOCK, EXPERTS)
    if expert < num_experts:
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < outputs
        spot = tl.arange(0, UNITS)
        matrix = matrices + expert.to(tl.int64) * outputs * units
        matrix_at = matrix + output[:, None].to(tl.int64) * units
        x_at = x + place[None, :].to(tl.int64) * units
        blocks = tl.cdiv(units, UNITS) if IS_BLOCKED else 1
        scales_at = scales + (expert * outputs + output) // GROUP * blocks if GROUP > 0 else scales
        total = tl.zeros([OUTPUTS, BLOCK], dtype=tl.float32)
        for first in range(0, units, UNITS):
            at = first + spot
            is_unit = at < units
            given = tl.load(x_at + at[:, None], mask=is_unit[:, None] & is_pair[None, :], other=0.0)
            is_weight = is_output[:, None] & is_unit[None, :]
            part = weights_at(matrix_at + at[None, :], is_weight, x.dtype.element_ty, GROUP, IS_NATIVE)
            total = plus_product(total, part, given, scales_at + first // UNITS, is_output, GROUP, IS_BLOCKED)
        if GROUP > 0 and not IS_BLOCKED:
            total *= tl.load(scales_at, mask=is_output, other=0.0)[:, None]
        total *= tl.load(weights + pair, mask=is_pair, other=0.0)[None, :]
        there = out + pair[None, :].to(tl.int64) * outputs + output[:, None]
        tl.store(there, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_pair[None, :])


@triton.jit(do_not_specialize=("size",))
def add_up(parts, out, size, outputs, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """What a row's experts gave, in the order in which it chose them.

    Grid: (ceil(size / BLOCK),), size = rows * outputs. parts [rows, PER_ROW, outputs]; out [rows, outputs].
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = at < size
    first = parts + at // outputs * (PER_ROW * outputs) + at % outputs
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(PER_ROW):
        total += tl.load(first + place * outputs, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_real)
