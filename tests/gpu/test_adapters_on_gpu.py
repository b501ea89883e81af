"""Adapters on a GPU: rows equal those of a CPU, in captured forwards and with norms left to kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.adapter_files import read_adapter
from engine.attention_kinds import AttentionKind
from engine.cuda_graphs import GraphedRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import LlamaWeights, load_llama_weights
from engine.loading import RunnerKind
from tests import emulated_cuda
from tests.engine import tiny_models
from tests.engine.test_adapters import SLOTS, loaded, session, two_adapters


@pytest.mark.parametrize("kind", ["lean", pytest.param("hf", marks=pytest.mark.thorough)])
def test_adapters_in_captured_forwards(kind: RunnerKind, tmp_path: Path) -> None:
    model = tiny_models.write("llama_least", tmp_path / "model")
    paths = two_adapters(model, tmp_path)
    on_cpu = loaded(model, paths)
    # Passes a self-test for each. Triton's interpreter would take half a minute.
    attention: AttentionKind = "padded" if emulated_cuda.IS_NEEDED else "auto"
    on_gpu = loaded(model, paths, kind, attention=attention, device="cuda")
    assert isinstance(on_gpu, GraphedRunner)
    # Each shape is captured when it comes again, and replayed with other adapters in the same rows.
    for adapters in ((1, 0, 2), (2, 2, 1), (0, 1, 0), (0, 0, 0), (0, 0, 0)):
        found, expected = session(on_gpu, adapters), session(on_cpu, adapters)
        for (_, got), (_, right) in zip(found, expected, strict=True):
            torch.testing.assert_close(got.cpu(), right, atol=1e-3, rtol=1e-4)
    assert {shape.is_adapted for shape in on_gpu.shapes} == {True, False}


def on_device(model: Path, paths: list[Path], cuda: torch.device) -> LlamaWeights:
    adapters = [read_adapter(path.name, path) for path in paths]
    return load_llama_weights(tiny_models.build("llama_least"), device=cuda, adapters=adapters)


def test_adapters_beside_norms_that_attention_does(tmp_path: Path, cuda: torch.device) -> None:
    model = tiny_models.write("llama_least", tmp_path / "model")
    paths = two_adapters(model, tmp_path)
    late = LlamaRunner(on_device(model, paths, cuda), SLOTS, "triton")
    assert late.late_norm is not None
    for (_, got), (_, right) in zip(
        session(late, (1, 2)), session(loaded(model, paths), (1, 2)), strict=True
    ):
        torch.testing.assert_close(got.cpu(), right, atol=1e-3, rtol=1e-4)


def test_adapters_beside_weights_of_eight_bits(
    tmp_path: Path, emulation: emulated_cuda.Emulation | None
) -> None:
    """Whose input has the scales of the norm before it, which others have in their weights."""
    model = tiny_models.write("llama_least", tmp_path / "model")
    paths = two_adapters(model, tmp_path)
    on_cpu = loaded(model, paths, quantization="fp8")
    attention: AttentionKind = "padded" if emulated_cuda.IS_NEEDED else "auto"
    on_gpu = loaded(model, paths, quantization="fp8", attention=attention, device="cuda", graphs=False)
    before = len(emulation.launches) if emulation else 0
    found = session(on_gpu, (1, 0, 2))
    if emulation:
        assert "multiply" in emulation.launches[before:]
    for (_, got), (_, right) in zip(found, session(on_cpu, (1, 0, 2)), strict=True):
        torch.testing.assert_close(got.cpu(), right, atol=1e-3, rtol=1e-4)
