"""Matrix products with constant weights and few rows, the bulk of a decoding step on a CPU."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]
"""From float32 [rows, inputs] to float32 [rows, outputs]."""

# Below this many multiplications the fixed cost of a oneDNN call (some 11 us) outweighs its faster kernel.
# Measured on an EPYC core, fp32, for (inputs, outputs) from (128, 128) to (384, 4096) and 1 to 256 rows.
_ONEDNN_FROM = 400_000
# Up to so many rows every number has a kernel of its own; beyond, multiples of the other.
_EXACT_ROWS, _ROW_STEP = 64, 32
_HALF_MAX = torch.finfo(torch.float16).max
# Inputs are made smaller by as much as weights are made larger, and must stay far from the smallest floats.
_MOST_DOUBLINGS = 32


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


def _one_thread(weight: torch.Tensor) -> Product:
    """The kernel without the fixed cost of the other one (4 us instead of 20), on the calling thread alone.

    PyTorch calls it deprecated; where it is gone the other one takes over.
    """
    packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
    return lambda x: torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, None)


def _many_threads(weight: torch.Tensor) -> Product:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)


@functools.cache
def _half_kernel(num_threads: int) -> Callable[[torch.Tensor], Product] | None:
    """FBGEMM's products of float32 rows with weights stored as float16; None where there are none.

    Weights are widened in registers and everything is computed in float32. Decoding a few rows reads all
    weights and does little with them, so half the bytes take about half the time.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:  # it is for x86 with AVX2
        return None
    has_one = hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation")
    kernel = _one_thread if num_threads == 1 and has_one else _many_threads
    with warnings.catch_warnings():  # it says once that it is deprecated: when packing, and when computing
        warnings.simplefilter("ignore")
        kernel(torch.ones(8, 8))(torch.ones(1, 8))
    return kernel


def _as_half(weight: torch.Tensor) -> tuple[torch.Tensor, float] | None:
    """`weight` times a power of two by which all its numbers are float16 numbers, and that; None without one.

    The power is 1 for those of float16 checkpoints. Those of bfloat16 have fewer digits but may be smaller
    than float16 goes, so all are made as large as it allows.
    """
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        return None
    most = math.floor(math.log2(_HALF_MAX / largest)) if largest else 0
    for power in (1.0, 2.0 ** min(most, _MOST_DOUBLINGS)):
        times = weight * power
        if torch.equal(times.half().float(), times):
            return times, power
    return None


class Linear:
    """`(x * scale) @ weight.T + bias` for float `x` [rows, inputs], with the weight laid out for speed.

    On a CPU in float32, weights that came from a float16 or bfloat16 checkpoint are kept in float16, and
    computed with in float32: the same numbers in half the memory, read in half the time. Other weights on
    a CPU use oneDNN with a blocked weight for products above a size (in fp32 twice as fast as
    `torch.nn.functional.linear` there, which calls MKL), and a transposed weight below; small ones are kept
    in both layouts. The choice depends on weights and shapes only, never on timing.

    Attributes:
        gain: what `x` is to be multiplied by before the call: nothing, it is in the weights.
    """

    gain: torch.Tensor | None = None

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> None:
        """Lay out `weight` [outputs, inputs], which is not kept, `bias` [outputs] and `scale` [inputs]."""
        self._bias = bias
        self._scale: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None
        self._transposed: torch.Tensor | None = None
        self._half: Product | None = None
        kernel = None
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            kernel = _half_kernel(torch.get_num_threads())
        half = None if kernel is None else _as_half(weight)
        if kernel is not None and half is not None:
            times, power = half
            self._half = kernel(times.contiguous())
            if scale is not None or power != 1.0:
                # Dividing by a power of two is exact.
                self._scale = (torch.ones(weight.shape[1]) if scale is None else scale.float()) / power
            return
        if scale is not None:
            # Folded in it costs nothing, but the products are no float16 numbers any more.
            weight = (weight.float() * scale.to(weight.device).float()).to(weight.dtype)
        self._size = weight.numel()
        if weight.device.type == "cpu" and _can_pack(weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
        # oneDNN is the faster one for bfloat16 at every size.
        if self._packed is None or (weight.dtype == torch.float32 and self._size < _ONEDNN_FROM):
            self._transposed = weight.t().contiguous()

    @property
    def is_homogeneous(self) -> bool:
        """Whether the product with a multiple of `x` is that multiple of the product."""
        return self._bias is None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, outputs] for `x` [rows, inputs]."""
        if self._half is not None:
            product = self._half(x if self._scale is None else x * self._scale)
            return product if self._bias is None else product.add_(self._bias)
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
        """`residual` [rows, outputs] plus this map of `x` [rows, inputs], maybe in `residual`'s memory."""
        if self._half is not None:
            return self(x).add_(residual)
        transposed = self._transposed
        if transposed is not None and (self._packed is None or x.shape[0] * self._size < _ONEDNN_FROM):
            # On CUDA torch would copy the residual first and add to the copy, a kernel more.
            in_place = residual.device.type == "cuda"
            out = residual.addmm_(x, transposed) if in_place else torch.addmm(residual, x, transposed)
            return out if self._bias is None else out.add_(self._bias)
        return self(x).add_(residual)
