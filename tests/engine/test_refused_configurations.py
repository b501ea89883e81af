"""What is told of models that Transformers cannot build, and of weights that give no numbers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.loading import RunnerKind, UnsupportedModel, load_runner
from tests.engine import tiny_models


def changed(directory: Path, **fields: object) -> Path:
    """A model whose configuration says something else; None leaves a field out."""
    tiny_models.write("llama", directory)
    config = {**json.loads((directory / "config.json").read_text()), **fields}
    kept = {name: value for name, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))
    return directory


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"model_type": "brandnew"},
            r"this Transformers \([\d.]+\S*\) does not know `model_type` 'brandnew' in",
        ),
        ({"model_type": None, "architectures": None}, "names no `model_type`"),
        ({"model_type": "t5"}, r"`model_type` 't5' in .*config\.json is no causal language model"),
        ({"model_type": "vit"}, r"is no causal language model that Transformers \(.*multimodal or encoder"),
        ({"hidden_act": "sillu"}, r"config\.json describes: 'sillu' in `hidden_act` is not known to this Tr"),
        (
            {"rope_parameters": {"rope_type": "yarnn", "rope_theta": 1e4, "factor": 4.0}},
            r"'yarnn' in `rope_parameters\.rope_type` is not known",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 4.0}},
            r"'su' in `rope_scaling\.type` is not known",
        ),
        (
            {"num_attention_heads": 3},
            r"config\.json describes: .*\(32\) is not a multiple of .* heads \(3\)\.$",
        ),
        ({"rms_norm_eps": "x"}, r"config\.json describes: Validation error for field 'rms_norm_eps': .*'x'"),
        ({"num_key_value_heads": 0}, r"config\.json describes: ZeroDivisionError: "),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "Missing required keys .*'factor'"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_told_in_a_line(
    fields: dict[str, object], told: str, tmp_path: Path
) -> None:
    directory = changed(tmp_path, **fields)
    with pytest.raises(UnsupportedModel, match=told) as refused:
        load_runner(directory, num_slots=64)
    assert str(directory / "config.json") in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("runner", ["lean", "hf"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(value: float, runner: RunnerKind, tmp_path: Path) -> None:
    file = tiny_models.write("llama", tmp_path) / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = value
    save_file(weights, file, {"format": "pt"})
    named = r"hold NaN or infinities, first in model\.layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(UnsupportedModel, match=named):
        load_runner(tmp_path, num_slots=64, runner=runner)


def test_a_model_that_is_too_large_for_float16_is_told_what_to_set(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(3e5)
    model.save_pretrained(tmp_path)
    load_runner(tmp_path, num_slots=64, dtype="bfloat16")
    with pytest.raises(UnsupportedModel, match=r"too large for float16; set `dtype: bfloat16` or `dtype: fl"):
        load_runner(tmp_path, num_slots=64, dtype="float16")


def test_why_a_model_goes_through_transformers_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny_models.write("gpt_neox", tmp_path / "other")
    with caplog.at_level(logging.WARNING):
        load_runner(directory, num_slots=64, runner="hf")  # as asked for
        load_runner(tiny_models.write("llama", tmp_path / "lean"), num_slots=64)
        assert "through Transformers" not in caplog.text
        load_runner(directory, num_slots=64)
    told = [record.getMessage() for record in caplog.records if "through Transformers" in record.getMessage()]
    assert told == [
        f"{directory} runs through Transformers, which is slower than the lean runner (docs/gpu.md): "
        "gpt_neox is not a Llama-shaped model"
    ]


def test_what_memory_lacks_is_not_blamed_on_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("no memory")

    directory = tiny_models.write("llama", tmp_path)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(MemoryError):
        load_runner(directory, num_slots=64)
