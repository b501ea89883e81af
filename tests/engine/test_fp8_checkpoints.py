"""Checkpoints with weights of eight bits give the logits that their numbers and scales mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.transformers_engine import load_model
from engine.checkpoint import Checkpoint
from engine.devices import Memory
from engine.fp8 import quantized
from engine.fp8_module import StoredFp8Linear
from engine.loading import RunnerKind, UnsupportedModel, load_runner
from engine.plain_model import put_beside
from engine.quantization import Quantization
from engine.quantized_checkpoint import block_of, load
from engine.rounding import rounded
from engine.stored_linear import widened
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
                height, width = tensors[f"{layer}.weight"].shape
                block_of_row = torch.arange(height)[:, None] // rows
                scale = tensors[f"{layer}.weight_scale_inv"][block_of_row, torch.arange(width) // columns]
                module.weight.copy_(tensors[f"{layer}.weight"].float() * scale)
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


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_floats_are_rounded_when_loading_where_it_is_asked_for(
    quantization: Quantization, tmp_path: Path
) -> None:
    directory = tiny_models.write("llama_bias", tmp_path)
    model = tiny_models.build("llama_bias")
    head = model.get_output_embeddings()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                module.weight.copy_(rounded(module.weight, quantization).dequantized(torch.float32))
    model.save_pretrained(tmp_path / "rounded")
    expected = logits_of(load_runner(tmp_path / "rounded", num_slots=128), 1)
    plain = logits_of(load_runner(directory, num_slots=128), 1)
    kinds: tuple[RunnerKind, ...] = ("lean", "hf")
    for kind in kinds:
        found = logits_of(load_runner(directory, num_slots=128, runner=kind, quantization=quantization), 1)
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


LAYER = "model.layers.1.mlp.up_proj"


def changed(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A checkpoint with other tensors."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def described(directory: Path, **about: object) -> Path:
    """A checkpoint that says something else of its quantization; nothing if `quant_method` is None."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= about
    if "quant_method" in about and about["quant_method"] is None:
        del config["quantization_config"]
    file.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.input_layernorm.weight"),
            r"`model.layers.1.input_layernorm.weight` is missing",
        ),
        (
            lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(3)}),
            r"`model.layers.7.mlp.up_proj.weight` is no tensor of the model .* left to Transformers",
        ),
        (
            lambda t: t.update(
                {
                    f"{LAYER}.weight": t[f"{LAYER}.weight"][:40].contiguous(),
                    f"{LAYER}.weight_scale_inv": t[f"{LAYER}.weight_scale_inv"][:3].contiguous(),
                }
            ),
            r"`model.layers.1.mlp.up_proj` in .*: \[40, 32\] where the model has \[48, 32\]",
        ),
        (
            lambda t: t.update({f"{LAYER}.weight_scale_inv": torch.ones(7, 7)}),
            r"scales \[7, 7\] fit no weight \[48, 32\] in blocks of 16 by 16",
        ),
        (
            lambda t: t.update({f"{LAYER}.weight_scale_inv": torch.full((3, 2), 120, dtype=torch.uint8)}),
            r"`model.layers.1.mlp.up_proj` in .*: scales of type uint8 are not understood",
        ),
        (
            lambda t: t.pop(f"{LAYER}.weight_scale_inv"),
            r"`model.layers.1.mlp.up_proj.weight` is of eight bits and has no scales beside it",
        ),
        (
            lambda t: t.update({f"{LAYER}.bias": torch.ones(48)}),
            r"`model.layers.1.mlp.up_proj` in .*: a bias too many",
        ),
    ],
    ids=["missing", "unknown", "shape", "blocks", "integers", "unscaled", "bias"],
)
def test_what_is_wrong_with_a_checkpoint_is_named(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    directory = changed(fp8_models.write("llama", "fine-grained", tmp_path), change)
    with pytest.raises(UnsupportedModel, match=message):
        load_runner(directory, num_slots=128)


def same(directory: Path, other: Path) -> bool:
    """Whether two checkpoints give the same logits."""
    of = [logits_of(load_runner(one, num_slots=128), 1) for one in (directory, other)]
    return all(torch.equal(one, two) for one, two in zip(*of, strict=True))


def test_scales_that_are_powers_of_two_may_be_stored_as_exponents(tmp_path: Path) -> None:
    def rounded(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_inv")]:
            tensors[name] = tensors[name].to(torch.float8_e8m0fnu).float()

    def stored(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_inv")]:
            tensors[name] = tensors[name].to(torch.float8_e8m0fnu).view(torch.uint8)

    floats = changed(fp8_models.write("llama", "fine-grained", tmp_path / "floats"), rounded)
    exponents = changed(fp8_models.write("llama", "fine-grained", tmp_path / "exponents"), stored)
    assert same(described(exponents, scale_fmt="ue8m0"), floats)


def test_what_is_not_of_the_model_is_passed_over(tmp_path: Path) -> None:
    """Scales of keys and values, angles that old checkpoints hold, and files beside the index."""
    plain = fp8_models.write("llama", "channel", tmp_path / "plain")
    layer = "model.layers.0.self_attn"
    extra = changed(
        fp8_models.write("llama", "channel", tmp_path / "extra"),
        lambda tensors: tensors.update(
            {
                f"{layer}.k_proj.k_scale": torch.ones(1),
                f"{layer}.kv_scale": torch.ones(1),
                f"{layer}.rotary_emb.inv_freq": torch.ones(4),
            }
        ),
    )
    save_file({"model.norm.weight": torch.zeros(32)}, extra / "z_old.safetensors")
    assert same(extra, plain)

    sharded = fp8_models.write("llama", "channel", tmp_path / "sharded")
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, sharded / file)
    save_file({"layers.0.wq": torch.zeros(3)}, sharded / "consolidated.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert same(sharded, plain)
    (sharded / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": torch.zeros(32)}, sharded / "other.safetensors")
    with pytest.raises(UnsupportedModel, match=r"`model.norm.weight` in .* and another file"):
        load_runner(sharded, num_slots=128)


def test_the_tensors_decide_not_what_the_format_is_called(tmp_path: Path) -> None:
    plain = fp8_models.write("llama", "tensor", tmp_path / "plain")
    silent = described(fp8_models.write("llama", "tensor", tmp_path / "silent"), quant_method=None)
    other = described(fp8_models.write("llama", "tensor", tmp_path / "other"), quant_method="modelopt")
    assert same(silent, plain)
    assert same(other, plain)
    lost = changed(silent, lambda tensors: tensors.pop(f"{LAYER}.weight_scale"))
    with pytest.raises(UnsupportedModel, match=r"its config.json does not describe, and `model.layers.1"):
        load_runner(lost, num_slots=128)


@pytest.mark.parametrize(
    ("about", "block"),
    [
        ({"weight_block_size": [64, 32]}, (64, 32)),
        ({"config_groups": {"group_0": {"weights": {"block_structure": "128x64"}}}}, (128, 64)),
        ({"config_groups": {"group_0": {"weights": {"strategy": "group", "group_size": 32}}}}, (1, 32)),
        ({"config_groups": {"group_0": {"weights": {"strategy": "channel"}}}}, (128, 128)),
    ],
)
def test_sizes_of_blocks(about: dict[str, object], block: tuple[int, int]) -> None:
    assert block_of(SimpleNamespace(quantization_config=about)) == block


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    """Of a checkpoint of floats, too: which numbers it has is looked up first."""
    directory = tiny_models.write("llama", tmp_path)
    (directory / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match=r"1 of them are not there, among them model-2"):
        load_runner(directory, num_slots=128)


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path: Path) -> None:
    directory = fp8_models.write("llama", "channel", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model-1.safetensors", {"format": "pt"})
    told = r"index\.json says that `model\.norm\.weight` is in model-1\.safetensors, where it is not"
    with pytest.raises(UnsupportedModel, match=told):
        load_runner(directory, num_slots=128)


def test_an_output_projection_of_eight_bits(tmp_path: Path) -> None:
    def quantize_head(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        tensors["lm_head.weight"] = (head / 0.01).to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = torch.full((1,), 0.01)

    directory = changed(fp8_models.write("llama_bias", "tensor", tmp_path / "own"), quantize_head)
    lean, other = (
        logits_of(load_runner(directory, num_slots=128, runner=kind), 1) for kind in ("lean", "hf")
    )
    for got, expected in zip(lean, other, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    tied = changed(fp8_models.write("llama", "tensor", tmp_path / "tied"), quantize_head)
    with pytest.raises(
        UnsupportedModel, match="its output projection is quantized and tied to the embedding"
    ):
        load_runner(tied, num_slots=128)


def test_experts_of_eight_bits_in_a_model_without_any_are_left_to_transformers(tmp_path: Path) -> None:
    expert = "model.layers.0.mlp.experts.0.up_proj"
    directory = changed(
        fp8_models.write("llama", "fine-grained", tmp_path),
        lambda tensors: tensors.update(
            {
                f"{expert}.weight": tensors[f"{LAYER}.weight"].clone(),
                f"{expert}.weight_scale_inv": torch.ones(3, 2),
            }
        ),
    )
    with pytest.raises(
        UnsupportedModel,
        match=rf"its experts are quantized \(`{expert}.weight`\), and those of LlamaForCausalLM are not "
        "read so; so its weights are left to Transformers, which needs a GPU for them, and it would run on "
        "cpu",
    ):
        load_runner(directory, num_slots=128)
    described(directory, quant_method="compressed-tensors")
    with pytest.raises(
        UnsupportedModel, match=r"by `compressed-tensors`, and its experts are quantized \(`model"
    ):
        load_runner(directory, num_slots=128)


def test_what_cannot_be_rounded_is_refused(tmp_path: Path) -> None:
    directory = fp8_models.write("llama", "fine-grained", tmp_path / "rounded")
    with pytest.raises(
        UnsupportedModel, match=r"`quantization` cannot round the model .* weights are quantized"
    ):
        load_runner(directory, num_slots=128, quantization="fp8")


def test_a_model_that_does_not_fit_beside_its_runner_is_widened_layer_by_layer(tmp_path: Path) -> None:
    """`meta` stands in for the GPU: what is multiplied comes there, and the weights stay where they are."""
    config = AutoConfig.from_pretrained(fp8_models.write("llama_bias", "channel", tmp_path))
    model = load(Checkpoint(tmp_path), config, torch.float32)
    size = sum(one.numel() * one.element_size() for one in model.parameters())
    with mock.patch("engine.plain_model.memory_of", return_value=Memory(0, 100, 0)):
        put_beside(model, torch.device("meta"))  # not even the rest fits
    assert model.get_input_embeddings().weight.device.type == "cpu"
    room = mock.patch("engine.plain_model.memory_of", return_value=Memory(0, size, 0))
    with (
        room,
        mock.patch("engine.plain_model._BYTES_ON_THE_WAY", 1),
    ):  # matrices are small beside the rest here
        put_beside(model, torch.device("meta"))
    kept = [module for module in model.modules() if isinstance(module, StoredFp8Linear)]
    assert {module.weight.device.type for module in kept} == {"cpu"}
    assert model.get_input_embeddings().weight.device.type == "meta"
    with widened(model), torch.no_grad():
        for layer in kept:
            assert layer(torch.zeros(2, layer.weight.shape[1], device="meta")).device.type == "meta"


def test_references_end_where_the_server_does(tmp_path: Path) -> None:
    """End tokens stand in generation_config.json, whichever way weights are read."""
    directory = fp8_models.write("llama", "channel", tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "pad_token_id": 5}))
    model = load_model(str(directory), "float32")
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == ([2, 7], 5)
    assert not any(isinstance(module, StoredFp8Linear) for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    ours = logits_of(load_runner(directory, num_slots=128), 1)[0]
    with torch.no_grad():
        rng = np.random.default_rng(1)
        tokens = torch.from_numpy(rng.integers(0, tiny_models.VOCABULARY, 20))[None]
        torch.testing.assert_close(model(tokens).logits[0], ours[:20], atol=1e-4, rtol=1e-4)
