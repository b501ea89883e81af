"""Checkpoints with weights of eight bits give the logits that their numbers and scales mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.fp8 import quantized
from engine.fp8_module import StoredFp8Linear, widened
from engine.loading import RunnerKind, UnsupportedModel, load_runner
from tests.engine import fp8_models, tiny_models
from tests.engine.fp8_models import Format
from tests.engine.test_runners import logits_of

IDS = torch.arange(1, 24)[None]


def by_hand(name: str, directory: Path) -> PreTrainedModel:
    """The tiny model with each number multiplied by its scale, in float32, as the formats' papers say."""
    model: PreTrainedModel = tiny_models.build(name)
    tensors = load_file(directory / "model.safetensors")
    rows, columns = fp8_models.BLOCK
    with torch.no_grad():
        for layer, module in model.named_modules():
            if f"{layer}.weight_scale" in tensors:
                scale = tensors[f"{layer}.weight_scale"].float()
                module.weight.copy_(tensors[f"{layer}.weight"].float() * scale)
            elif f"{layer}.weight_scale_inv" in tensors:
                for row, column in torch.cartesian_prod(
                    *(torch.arange(size) for size in tensors[f"{layer}.weight"].shape)
                ).tolist():
                    scale = tensors[f"{layer}.weight_scale_inv"][row // rows, column // columns]
                    module.weight[row, column] = tensors[f"{layer}.weight"][row, column].float() * scale
    return model


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("llama", "fine-grained"),
        ("llama_bias", "channel"),
        ("qwen3", "tensor"),
        ("qwen2", "fbgemm"),
    ],
)
def test_both_runners_give_the_logits_of_the_numbers(name: str, format: Format, tmp_path: Path) -> None:
    directory = fp8_models.write(name, format, tmp_path)
    plain = tmp_path / "plain"
    by_hand(name, directory).save_pretrained(plain)
    expected = logits_of(load_runner(plain, num_slots=128), 1)
    assert (
        float(
            (
                logits_of(load_runner(tiny_models.write(name, tmp_path / "other"), num_slots=128), 1)[0]
                - expected[0]
            )
            .abs()
            .max()
        )
        > 1e-3
    )
    kinds: tuple[RunnerKind, ...] = ("lean", "hf")
    for kind in kinds:  # each passes its self-test, too
        for got, wanted in zip(
            logits_of(load_runner(directory, num_slots=128, runner=kind), 1), expected, strict=True
        ):
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_transformers_reads_the_same_numbers(tmp_path: Path) -> None:
    """Without a GPU it widens fine-grained checkpoints itself."""
    directory = fp8_models.write("llama_dynamic", "fine-grained", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ours = load_runner(directory, num_slots=128)
    assert type(ours).__name__ == "HFRunner"  # rotary angles change with the length
    with torch.no_grad():
        expected = theirs(input_ids=IDS).logits[0]
    from engine.hf_runner import Segment

    numbers = torch.arange(IDS.shape[1], dtype=torch.int32).numpy()
    segment = Segment(tokens=IDS[0].int().numpy(), positions=numbers, slots=numbers, past=numbers[:0])
    torch.testing.assert_close(ours.forward([segment], numbers), expected, atol=1e-5, rtol=1e-4)


def test_floats_are_rounded_when_loading_where_it_is_asked_for(tmp_path: Path) -> None:
    directory = tiny_models.write("llama_bias", tmp_path)
    rounded = tiny_models.build("llama_bias")
    head = rounded.get_output_embeddings()
    with torch.no_grad():
        for module in rounded.modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                module.weight.copy_(quantized(module.weight).dequantized(torch.float32))
    rounded.save_pretrained(tmp_path / "rounded")
    expected = logits_of(load_runner(tmp_path / "rounded", num_slots=128), 1)
    plain = logits_of(load_runner(directory, num_slots=128), 1)
    kinds: tuple[RunnerKind, ...] = ("lean", "hf")
    for kind in kinds:
        found = logits_of(load_runner(directory, num_slots=128, runner=kind, quantization="fp8"), 1)
        for got, wanted, before in zip(found, expected, plain, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
            assert float((got - before).abs().max()) > 1e-3


def test_a_layer_multiplies_rows_of_any_shape() -> None:
    weight = quantized(torch.randn(32, 48))
    layer = StoredFp8Linear(weight.numbers.view(torch.float8_e4m3fn), weight.scales[:1], torch.randn(32))
    x = torch.randn(2, 3, 48)
    expected = x @ weight.dequantized(torch.float32).T + layer.bias
    torch.testing.assert_close(layer(x), expected)
    with widened(layer):
        assert layer.is_widened
    assert not layer.is_widened


def changed(directory: Path, change: str) -> Path:
    """A checkpoint with something wrong."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    layer = "model.layers.1.mlp.up_proj"
    if change == "missing":
        del tensors["model.layers.1.input_layernorm.weight"]
    elif change == "unknown":
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
    elif change == "shape":
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"][:40].contiguous()
        tensors[f"{layer}.weight_scale_inv"] = tensors[f"{layer}.weight_scale_inv"][:3].contiguous()
    elif change == "scales":
        tensors[f"{layer}.weight_scale_inv"] = torch.ones(7, 7)
    elif change == "bias":
        tensors[f"{layer}.bias"] = torch.ones(48)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"`model.layers.1.input_layernorm.weight` is missing"),
        ("unknown", r"`model.layers.7.mlp.up_proj.weight` in .* is no tensor of the model"),
        ("shape", r"`model.layers.1.mlp.up_proj` in .*: \[40, 32\] where the model has \[48, 32\]"),
        ("scales", r"scales \[7, 7\] fit no weight \[48, 32\] in blocks of 16 by 16"),
        ("bias", r"`model.layers.1.mlp.up_proj` in .*: a bias too many"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_named(change: str, message: str, tmp_path: Path) -> None:
    directory = changed(fp8_models.write("llama", "fine-grained", tmp_path), change)
    with pytest.raises(UnsupportedModel, match=message):
        load_runner(directory, num_slots=128)


def test_experts_of_eight_bits_are_left_to_transformers(tmp_path: Path) -> None:
    directory = fp8_models.write("llama", "fine-grained", tmp_path)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    expert = "model.layers.0.mlp.experts.0.up_proj"
    tensors[f"{expert}.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].clone()
    tensors[f"{expert}.weight_scale_inv"] = torch.ones(3, 2)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModel,
        match=rf"left to Transformers \(1 of its FP8 weights are of no linear layer, `{expert}` for one\), which "
        "needs a GPU, and it would run on cpu",
    ):
        load_runner(directory, num_slots=128)
    config = directory / "config.json"
    about = json.loads(config.read_text())
    about["quantization_config"]["quant_method"] = "compressed-tensors"
    config.write_text(json.dumps(about))
    with pytest.raises(UnsupportedModel, match=r"quantized by `compressed-tensors` \(1 of its FP8"):
        load_runner(directory, num_slots=128)
