"""Quantized weights on a GPU: models equal to a CPU, products to those of the widened matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention_kinds import AttentionKind
from engine.fp8 import quantized
from engine.integer_weight import IntegerWeight
from engine.loading import RunnerKind, load_runner
from engine.quantization import Quantization
from engine.quantized_linear import QuantizedWeight, product_of
from tests import emulated_cuda
from tests.engine import fp8_models, integer_models
from tests.engine.test_runners import logits_of

only_on_gpus = pytest.mark.skipif(
    emulated_cuda.IS_NEEDED, reason="needs a GPU: the emulated one does not have what is tested"
)


@pytest.mark.parametrize("runner", [pytest.param("lean", marks=pytest.mark.thorough), "hf"])
def test_quantized_weights_equal_widened_ones(
    runner: RunnerKind, target: Path, tmp_path: Path, emulation: emulated_cuda.Emulation | None
) -> None:
    attention: AttentionKind = "padded" if emulated_cuda.IS_NEEDED else "auto"
    name = "llama_least" if emulated_cuda.IS_NEEDED else "qwen3"  # a layer takes the interpreter seconds
    checkpoint = fp8_models.write(name, "channel", tmp_path / "fp8")
    cases: list[tuple[Path, Quantization | None]] = [(checkpoint, None), (tmp_path / "integers", None)]
    integer_models.write(name, "packed-channel", tmp_path / "integers")
    if runner == "lean" or not emulated_cuda.IS_NEEDED:
        cases.append((target, "fp8"))
    for directory, quantization in cases:
        on_cpu = load_runner(directory, num_slots=256, runner=runner, quantization=quantization)
        on_gpu = load_runner(
            directory,
            num_slots=256,
            runner=runner,
            quantization=quantization,
            attention=attention,
            device="cuda",
        )
        before = len(emulation.launches) if emulation else 0
        found = logits_of(on_gpu, 1)
        if emulation:
            assert "multiply" in emulation.launches[before:]
        for got, expected in zip(found, logits_of(on_cpu, 1), strict=True):
            torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=1e-4)


def random_integers(
    sizes: tuple[int, int], bits: int, device: torch.device, *, is_ordered: bool
) -> IntegerWeight:
    groups = -(-sizes[1] // 128)
    numbers = torch.randint(1 << bits, sizes, dtype=torch.uint8, device=device)
    scales = (0.5 + torch.rand(sizes[0], groups, device=device)) * sizes[1] ** -0.5 / (1 << bits)
    zeros = torch.randint(1 << bits, (sizes[0], groups), dtype=torch.uint8, device=device)
    order = torch.randperm(sizes[1], device=device) if is_ordered else None
    return IntegerWeight.of(numbers, scales, zeros, group=128, bits=bits, order=order)


@only_on_gpus  # without, see tests/engine/test_fp8.py and test_integer_weight.py
# In this order: kernels are compiled one by one, for minutes, and what matters least is to be cut off.
@pytest.mark.parametrize("sizes", [(4096, 4096), (6144, 4096), (4096, 14336), (200, 300)])
@pytest.mark.parametrize("kind", ["int4", "int8", "int4-ordered", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_with_quantized_weights(
    kind: str, dtype: torch.dtype, sizes: tuple[int, int], cuda: torch.device
) -> None:
    torch.manual_seed(0)
    weight: QuantizedWeight
    if kind == "fp8":
        weight = quantized(torch.randn(*sizes, device=cuda) * sizes[1] ** -0.5)
    else:
        weight = random_integers(sizes, int(kind[3]), cuda, is_ordered=kind.endswith("ordered"))
    product, wide = product_of(weight), weight.dequantized(torch.float32)
    alone = None
    for rows in (16, 1, 17, 64, 128, 129, 600):
        x = torch.randn(600, sizes[1], device=cuda).to(dtype)[:rows]
        x[0] = 1.0
        residual = torch.randn(rows, sizes[0], device=cuda).to(dtype)
        expected = (x.double() @ wide.double().T + residual).to(dtype)
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(product(x, None, residual), expected, atol=tolerance, rtol=tolerance)
        # Summed in one order, whatever is decoded beside it; without a residual a kernel of its own.
        none = None if sizes == (4096, 4096) else torch.zeros_like(residual)
        first = product(x, None, none)[0]
        alone = first if alone is None else alone
        assert rows > 16 or torch.equal(first, alone)
