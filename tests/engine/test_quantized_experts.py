"""Checkpoints whose experts are quantized: the floats that their numbers stand for, by either runner."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.expert_routing import routing_of
from engine.hf_runner import HFRunner
from engine.llama_runner import LlamaRunner
from engine.loading import UnsupportedModel, load_runner
from engine.quantization import Quantization
from engine.rounding import round_linears
from engine.separated_experts import SeparatedExperts, can_be_separated, separate
from tests.engine import fp8_models, integer_models, tiny_models
from tests.engine.fp8_models import BLOCK
from tests.engine.test_runners import logits_of

NAMES = ("mixtral", "qwen2_moe", "qwen3_moe")
Tensors = dict[str, torch.Tensor]
Format = Literal["fine-grained"] | integer_models.Format


def write(name: str, format: Format, directory: Path, floats: Path) -> tuple[Path, Path]:
    """The tiny model with quantized weights, and with what they stand for."""
    tensors = load_file(tiny_models.write(name, floats) / "model.safetensors")
    meant: Tensors
    if format == "fine-grained":
        found = load_file(fp8_models.write(name, "fine-grained", directory) / "model.safetensors")
        meant = {
            module: each(found, module)
            for module in tiny_models.experts_in(tensors) + tiny_models.layers(name)
        }
    else:
        written = integer_models.write(name, format, directory)
        meant = {module: torch.from_numpy(matrix) for module, matrix in written.items()}
    experts = tiny_models.experts_in(tensors)
    assert len(experts) >= 12
    assert set(experts) <= meant.keys()
    tensors |= {f"{module}.weight": matrix for module, matrix in meant.items()}
    save_file(tensors, floats / "model.safetensors", {"format": "pt"})
    return directory, floats


def each(tensors: Tensors, module: str) -> torch.Tensor:
    numbers, scales = tensors[f"{module}.weight"].float(), tensors[f"{module}.weight_scale_inv"]
    scales = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return numbers * scales[: numbers.shape[0], : numbers.shape[1]]


@pytest.mark.parametrize("format", ["fine-grained", "gptq-asymmetric", "awq", "packed", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_experts_are_the_floats_that_their_numbers_say(name: str, format: Format, tmp_path: Path) -> None:
    quantized, floats = write(name, format, tmp_path / "quantized", tmp_path / "floats")
    expected = logits_of(load_runner(floats, num_slots=128), 1)
    lean, other = (load_runner(quantized, num_slots=128, runner=kind) for kind in ("lean", "hf"))
    assert isinstance(lean, LlamaRunner)
    assert isinstance(other, HFRunner)
    assert lean.shape == other.shape
    for runner in (lean, other):
        for got, wide in zip(logits_of(runner, 1), expected, strict=True):
            torch.testing.assert_close(got, wide, atol=2e-4, rtol=1e-4)


def test_models_that_only_transformers_runs_have_them_too(tmp_path: Path) -> None:
    quantized, floats = write("phimoe_window", "fine-grained", tmp_path / "quantized", tmp_path / "floats")
    found, expected = (load_runner(one, num_slots=128, max_tokens=64) for one in (quantized, floats))
    assert isinstance(found, HFRunner)
    for got, wide in zip(logits_of(found, 1), logits_of(expected, 1), strict=True):
        torch.testing.assert_close(got, wide, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*NAMES, "phimoe_window"])
def test_separated_experts_compute_what_fused_ones_do(name: str) -> None:
    """The self-test compares a runner with the model that has them: a mistake in them it would not notice."""
    model = tiny_models.build(name)
    tokens = torch.arange(40).view(2, 20) + 3
    with torch.no_grad(), routing_of(model) as fused:
        expected = model(tokens).logits
    paths = [path for path, module in model.named_modules() if can_be_separated(module)]
    assert paths
    separate(model)
    assert all(isinstance(model.get_submodule(path), SeparatedExperts) for path in paths)
    with torch.no_grad(), routing_of(model) as separated:
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    assert separated.share == fused.share > 0


def test_experts_that_compute_otherwise_stay_together() -> None:
    model = tiny_models.build("gpt_oss_window")
    assert not any(can_be_separated(module) for module in model.modules())
    other = next(module for module in tiny_models.build("mixtral").modules() if can_be_separated(module))
    changed = type("Changed", (type(other),), {"forward": lambda self, x, index, weights: x})
    other.__class__ = changed
    assert not can_be_separated(other)


def test_experts_of_floats_beside_quantized_attention_are_read(tmp_path: Path) -> None:
    quantized, floats = write("mixtral", "awq", tmp_path / "quantized", tmp_path / "floats")
    exact = load_file(floats / "model.safetensors")
    file = quantized / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
    tensors |= {name: tensor for name, tensor in exact.items() if ".experts." in name}
    save_file(tensors, file, {"format": "pt"})
    expected = logits_of(load_runner(floats, num_slots=128), 1)
    for runner in (load_runner(quantized, num_slots=128, runner=kind) for kind in ("lean", "hf")):
        for got, wide in zip(logits_of(runner, 1), expected, strict=True):
            torch.testing.assert_close(got, wide, atol=2e-4, rtol=1e-4)


def test_an_expert_that_lacks_its_weight_is_told(tmp_path: Path) -> None:
    directory = fp8_models.write("mixtral", "fine-grained", tmp_path)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = tiny_models.experts_in(tensors)[3]
    for part in ("weight", "weight_scale_inv"):
        del tensors[f"{name.removesuffix('.weight_scale_inv')}.{part}"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"experts\.\d+\.w\d\.weight` is missing"):
        load_runner(directory, num_slots=128)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_experts_are_rounded_when_loading_like_other_layers(
    quantization: Quantization, tmp_path: Path
) -> None:
    directory = tiny_models.write("qwen3_moe", tmp_path)
    lean, other = (
        load_runner(directory, num_slots=128, runner=kind, quantization=quantization)
        for kind in ("lean", "hf")
    )
    for got, expected in zip(logits_of(lean, 1), logits_of(other, 1), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    model = tiny_models.build("qwen3_moe")
    num_layers = round_linears(model, quantization, keep=model.get_output_embeddings())
    assert num_layers == 2 * (4 + 6 * 3)
