"""Kernels in Triton: what products with quantized weights of any kind do with their sums.

Imported only where they are launched, since it imports Triton, which comes with CUDA builds of torch.
With TRITON_INTERPRET=1 set before, Triton runs them on a CPU, operation by operation in numpy.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_tile(
    total,
    bias,
    residual,
    out,
    unit,
    row,
    num_rows,
    outputs,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Stores the sums of some outputs, `unit`, for some rows, `row`: total float32 [units, rows].

    With bias and residual, in out's type; or if IS_SPLIT without, at the program's split (third axis).
    """
    is_unit = unit < outputs
    at = row[None, :].to(tl.int64) * outputs + unit[:, None]
    is_real = is_unit[:, None] & (row < num_rows)[None, :]
    if IS_SPLIT:
        tl.store(out + tl.program_id(2).to(tl.int64) * num_rows * outputs + at, total, mask=is_real)
    else:
        if HAS_BIAS:
            total += tl.load(bias + unit, mask=is_unit, other=0.0).to(tl.float32)[:, None]
        if HAS_RESIDUAL:
            total += tl.load(residual + at, mask=is_real, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=("size",))
def add_splits(
    partial,
    bias,
    residual,
    out,
    size,
    outputs,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """The splits' sums, added one after the other, and to bias and residual.

    Grid: (ceil(size / BLOCK),), size = rows * outputs. partial float32 [SPLITS, rows, outputs]; bias
    [outputs]; residual and out [rows, outputs].
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = at < size
    total = tl.load(partial + at, mask=is_real, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial + split * size.to(tl.int64) + at, mask=is_real, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % outputs, mask=is_real, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_real)
