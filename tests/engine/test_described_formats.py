"""What config.json calls quantized and is not, and what is told of formats that are not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.transformers_engine import load_model
from engine.integer_formats import from_packed
from engine.integer_weight import IntegerWeight
from engine.loading import UnsupportedModel, load_runner
from engine.quantization_check import check_quantization
from engine.quantized_files import UnsuitableWeights
from tests.engine import tiny_models
from tests.engine.test_runners import logits_of

Parts = dict[str, torch.Tensor]
KV: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
SPARSE: dict[str, Any] = {"format": "dense", "sparsity_structure": "2:4", "targets": ["Linear"]}
QUANTIZED = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}


def write(
    directory: Path,
    described: dict[str, Any] | None,
    *,
    name: str = "llama",
    instead: Callable[[torch.Tensor], Parts] | None = None,
    more: dict[str, torch.Tensor] | None = None,
) -> Path:
    """A tiny model that says so of its quantization, with other tensors for its layers' weights, and more."""
    tiny_models.write(name, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for layer, module in tiny_models.build(name).named_modules():
        if instead is not None and type(module) is nn.Linear and layer != "lm_head":
            made = instead(tensors.pop(f"{layer}.weight"))
            tensors |= {f"{layer}.{part}": one for part, one in made.items()}
    save_file(tensors | (more or {}), file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    if described is not None:
        config["quantization_config"] = described
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": KV},
        {"quant_method": "compressed-tensors", "sparsity_config": SPARSE},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": KV},
    ],
    ids=["keys and values", "sparse", "ModelOpt"],
)
def test_weights_of_floats_are_read_whatever_else_is_quantized(
    described: dict[str, Any], tmp_path: Path
) -> None:
    scales = {f"model.layers.{i}.self_attn.{one}_scale": torch.tensor([0.5]) for i in (0, 1) for one in "kv"}
    directory = write(tmp_path / "described", described, more=scales)
    check_quantization(directory)
    plain = tiny_models.write("llama", tmp_path / "plain")
    for kind in ("lean", "hf"):
        expected, found = (
            logits_of(load_runner(one, num_slots=128, runner=kind), 1) for one in (plain, directory)
        )
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got, wanted)
    reference = load_model(str(directory), "float32")
    assert torch.equal(reference.lm_head.weight.cpu(), tiny_models.build("llama").lm_head.weight)


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "compressed-tensors", "format": "dense", "config_groups": QUANTIZED},
        {"quant_method": "compressed-tensors", "sparsity_config": SPARSE | {"format": "sparse-24-bitmask"}},
        {"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"R1": {}}},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "bitnet"},
    ],
)
def test_floats_that_are_to_be_rounded_or_turned_are_refused(
    described: dict[str, Any], tmp_path: Path
) -> None:
    directory = write(tmp_path, described)
    told = "none of its weights is in a format that is read here; use the checkpoint without quantization"
    with pytest.raises(UnsuitableWeights, match=told):
        check_quantization(directory)
    with pytest.raises(UnsupportedModel, match=told):
        load_runner(directory, num_slots=128)


def nvfp4(weight: torch.Tensor) -> Parts:
    outputs, inputs = weight.shape
    return {
        "weight_packed": torch.zeros(outputs, inputs // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(outputs, inputs // 16).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.ones(1),
        "input_global_scale": torch.ones(1),
    }


def modelopt_nvfp4(weight: torch.Tensor) -> Parts:
    parts = nvfp4(weight)
    return {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": torch.tensor(1.0),
    }


def mxfp4(weight: torch.Tensor) -> Parts:
    outputs, inputs = weight.shape
    return {
        "weight_packed": torch.zeros(outputs, inputs // 2, dtype=torch.uint8),
        "weight_scale": torch.full((outputs, inputs // 32), 127, dtype=torch.uint8),
    }


def mxfp8(weight: torch.Tensor) -> Parts:
    """As llm-compressor and AutoRound write it: an exponent for 32 inputs."""
    outputs, inputs = weight.shape
    blocks = -(-inputs // 32)
    exponents = torch.arange(outputs * blocks).view(outputs, blocks) % 5 - 9
    numbers = weight / torch.exp2(exponents).repeat_interleave(32, 1)[:, :inputs]
    return {
        "weight": numbers.clamp(-448, 448).to(torch.float8_e4m3fn),
        "weight_scale": (exponents + 127).to(torch.uint8),
    }


def marlin(weight: torch.Tensor) -> Parts:
    return {
        "weight_packed": torch.zeros(2, 2 * len(weight), dtype=torch.int32),
        "scale_packed": torch.ones(2, len(weight)),
        "meta": torch.zeros(2, 8, dtype=torch.int16),
    }


def torchao(weight: torch.Tensor) -> Parts:
    return {
        "_weight_qdata": weight.to(torch.float8_e4m3fn),
        "_weight_scale": torch.ones(len(weight), 1),
    }


def quanto(weight: torch.Tensor) -> Parts:
    """As its own `save_pretrained` writes numbers of four bits; config.json says nothing of them."""
    return {
        "weight._data._data": torch.zeros(len(weight), weight.shape[1] // 2, dtype=torch.uint8),
        "weight._scale": torch.ones(len(weight), 1),
        "weight._shift": torch.ones(len(weight), 1),
    }


def bitsandbytes(weight: torch.Tensor) -> Parts:
    return {"weight": weight.to(torch.int8), "SCB": torch.ones(len(weight))}


def mlx(weight: torch.Tensor) -> Parts:
    outputs, inputs = weight.shape
    return {
        "weight": torch.zeros(outputs, inputs // 8, dtype=torch.int32).view(torch.uint32),
        "scales": torch.ones(outputs, 1),
        "biases": torch.ones(outputs, 1),
    }


@pytest.mark.parametrize(
    ("described", "instead", "told"),
    [
        ({"quant_method": "compressed-tensors"}, nvfp4, "weight_global_scale` belongs to weights in NVFP4"),
        (
            {"quant_method": "compressed-tensors"},
            mxfp4,
            "weight_packed` is in MXFP4 .* use the checkpoint with",
        ),
        ({"quant_method": "modelopt"}, modelopt_nvfp4, r"weight_scale_2` belongs to weights .*NVFP4"),
        (
            None,
            modelopt_nvfp4,
            r"not describe, and .*scale_2` .*NVFP4.* use the checkpoint without quantizat",
        ),
        (
            {"quant_method": "compressed-tensors"},
            marlin,
            r"scale_packed` .*\(`marlin-24`\), which are not re",
        ),
        ({"quant_method": "torchao"}, torchao, "_weight_qdata` belongs to weights as torchao stores them"),
        (None, quanto, r"not describe, and .*weight._data._data` belongs to weights as quanto stores them"),
        (
            {"quant_method": "bitsandbytes"},
            bitsandbytes,
            "SCB` belongs to weights as bitsandbytes stores them",
        ),
        ({"bits": 4}, mlx, r"in a way not named \(config.json has no `quant_method`\), and .* as MLX sto"),
    ],
)
def test_other_formats_are_called_what_they_are(
    described: dict[str, Any] | None, instead: Callable[[torch.Tensor], Parts], told: str, tmp_path: Path
) -> None:
    directory = write(tmp_path, described, instead=instead)
    with pytest.raises(UnsuitableWeights, match=told):
        check_quantization(directory)
    with pytest.raises(UnsupportedModel, match=told):
        load_runner(directory, num_slots=128)


def few_bits(bits: int) -> Callable[[torch.Tensor], Parts]:
    """GPTQ's words of so many bits, all zeros."""

    def packed(weight: torch.Tensor) -> Parts:
        outputs, inputs = weight.shape
        return {
            "qweight": torch.zeros(inputs * bits // 32, outputs, dtype=torch.int32),
            "qzeros": torch.zeros(1, outputs * bits // 32, dtype=torch.int32),
            "scales": torch.ones(1, outputs),
        }

    return packed


def two_bits(weight: torch.Tensor) -> Parts:
    outputs, inputs = weight.shape
    return {
        "weight_packed": torch.zeros(outputs, inputs * 2 // 32, dtype=torch.int32),
        "weight_scale": torch.ones(outputs, 1),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


@pytest.mark.parametrize(
    ("method", "instead", "told"),
    [
        ("gptq", few_bits(2), "32 numbers in 2 words: those of four and of eight bits are read, not of 2"),
        ("auto-round", few_bits(3), "32 numbers in 3 words: .* not of 3"),
        ("compressed-tensors", two_bits, "48 numbers in 3 words: .* not of 2"),
    ],
)
def test_numbers_of_few_bits_are_refused_before_loading(
    method: str, instead: Callable[[torch.Tensor], Parts], told: str, tmp_path: Path
) -> None:
    directory = write(tmp_path, {"quant_method": method}, instead=instead)
    with pytest.raises(UnsuitableWeights, match=f"` has {told}; use the checkpoint without quantization"):
        check_quantization(directory)
    with pytest.raises(UnsupportedModel, match=told):
        load_runner(directory, num_slots=128)


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
    ],
)
def test_packings_that_config_json_names_are_refused_before_loading(
    described: dict[str, Any], tmp_path: Path
) -> None:
    directory = write(tmp_path, described, instead=few_bits(4))
    with pytest.raises(UnsuitableWeights, match=r"packing '(gemv|marlin)' is not read, only 'g"):
        check_quantization(directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (directory / "config.json").write_text(json.dumps(config))
    check_quantization(directory)


def test_files_that_are_not_the_models_are_not_judged(tmp_path: Path) -> None:
    directory = tiny_models.write("llama", tmp_path)
    save_file(few_bits(2)(torch.zeros(32, 32)), directory / "other.safetensors")
    check_quantization(directory)


@pytest.mark.parametrize(
    ("kind", "told"),
    [(torch.int8, "is of eight bits and has no scales"), (torch.int16, "is of type I16, which is not read")],
)
def test_experts_of_integers_are_no_floats(kind: torch.dtype, told: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    tiny_models.write("qwen2_moe_window", directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    experts = "model.layers.0.mlp.experts"
    gate, up, down = (
        torch.stack([tensors.pop(f"{experts}.{expert}.{one}_proj.weight") for expert in (0, 1)])
        for one in ("gate", "up", "down")
    )
    tensors |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), f"{experts}.down_proj": down.to(kind)}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=rf"`{experts}.down_proj` {told}"):
        load_runner(directory, num_slots=128, max_tokens=64)


def test_quantized_experts_of_models_that_compute_otherwise_are_told(tmp_path: Path) -> None:
    expert = "model.layers.0.mlp.experts.0.down_proj"
    words = {
        f"{expert}.qweight": torch.zeros(2, 32, dtype=torch.int32),
        f"{expert}.scales": torch.ones(1, 32),
    }
    directory = write(tmp_path, {"quant_method": "gptq", "bits": 4}, name="gpt_oss_window", more=words)
    with pytest.raises(
        UnsupportedModel,
        match=rf"its experts are quantized \(`{expert}.qweight`\), and those of GptOssForCausalLM are not",
    ):
        load_runner(directory, num_slots=128)


@pytest.mark.parametrize(
    "described", [{"quant_method": "compressed-tensors"}, {"quant_method": "auto-round", "group_size": 32}]
)
def test_mxfp8_is_read(described: dict[str, Any], tmp_path: Path) -> None:
    def meant(weight: torch.Tensor) -> Parts:
        parts = mxfp8(weight)
        scales = torch.exp2(parts["weight_scale"].float() - 127).repeat_interleave(32, 1)
        return {"weight": parts["weight"].float() * scales[:, : weight.shape[1]]}

    plain = write(tmp_path / "plain", None, instead=meant)
    stored = write(tmp_path / "stored", described, instead=mxfp8)
    expected, found = (logits_of(load_runner(one, num_slots=128), 1) for one in (plain, stored))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_integers_of_one_scale_are_read() -> None:
    words = torch.tensor([[0x76543210, -0x01234568]] * 3, dtype=torch.int32)
    parts = {"weight_packed": words, "weight_scale": torch.tensor([0.5])}
    found = from_packed(parts, (3, 16))
    assert isinstance(found, IntegerWeight)
    meant = (torch.arange(16) - 8) * 0.5
    assert torch.equal(found.dequantized(torch.float32), meant.expand(3, 16))
