"""Matrix products with constant weights and few rows, the bulk of a decoding step on a CPU."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

# Below this many multiplications the fixed cost of a oneDNN call (some 11 us) outweighs its faster kernel.
# Measured on an EPYC core, fp32, for (inputs, outputs) from (128, 128) to (384, 4096) and 1 to 256 rows.
_ONEDNN_FROM = 400_000
# Up to so many rows every number has a kernel of its own; beyond, multiples of the other.
_EXACT_ROWS, _ROW_STEP = 64, 32


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's linear kernel with weights in its own blocked layout works here for `dtype`."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    x = torch.randn(3, 32, generator=generator).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        out = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(out.float(), F.linear(x.float(), weight.float()), rtol=2e-2, atol=5e-2)


class Linear:
    """`x @ weight.T + bias` for float `x` [rows, inputs], with the weight laid out for speed.

    On a CPU, products above a size use oneDNN with a blocked weight (in fp32 twice as fast as
    `torch.nn.functional.linear` there, which calls MKL); those below use a transposed weight. Small
    weights are kept in both layouts. The choice depends on shapes only, never on timing.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Lay out `weight` [outputs, inputs], which is not kept, and `bias` [outputs]."""
        self._bias = bias
        self._size = weight.numel()
        self._packed: torch.Tensor | None = None
        self._transposed: torch.Tensor | None = None
        if weight.device.type == "cpu" and _can_pack(weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
        # oneDNN is the faster one for bfloat16 at every size.
        if self._packed is None or (weight.dtype == torch.float32 and self._size < _ONEDNN_FROM):
            self._transposed = weight.t().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, outputs] for `x` [rows, inputs]."""
        transposed = self._transposed
        if transposed is not None and (self._packed is None or x.shape[0] * self._size < _ONEDNN_FROM):
            return torch.mm(x, transposed) if self._bias is None else torch.addmm(self._bias, x, transposed)
        # oneDNN compiles a kernel for every number of rows it meets (some 0.7 ms each time), and prompts come
        # in all lengths: those of many rows are rounded up.
        rows = x.shape[0]
        missing = -rows % _ROW_STEP if rows > _EXACT_ROWS else 0
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out[:rows] if missing else out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual` [rows, outputs] plus this map of `x` [rows, inputs]."""
        transposed = self._transposed
        if transposed is not None and (self._packed is None or x.shape[0] * self._size < _ONEDNN_FROM):
            out = torch.addmm(residual, x, transposed)
            return out if self._bias is None else out.add_(self._bias)
        return self(x).add_(residual)
