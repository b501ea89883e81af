"""Checkpoints whose experts are in MXFP4, as gpt-oss is published, are read as the floats that they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loading import load_runner
from engine.quantization_check import check_quantization
from engine.unsupported_model import UnsupportedModel
from tests.engine import tiny_models
from tests.engine.test_runners import logits_of

# The numbers of four bits (OCP Microscaling Formats, E2M1), by their code.
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP = 32


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, exponents, and the weight they stand for, of [experts, inputs, outputs]."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, GROUP))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 1  # the largest is between 2 and 4
    codes = (groups[..., None] / torch.exp2(exponent)[..., None, None] - NUMBERS).abs().argmin(-1)
    said = NUMBERS[codes] * torch.exp2(exponent)[..., None]
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return blocks, (exponent + 127).to(torch.uint8), said.flatten(2).transpose(1, 2)


def write(directory: Path) -> tuple[Path, Path]:
    """The tiny gpt-oss with its experts in MXFP4, and with the floats that these stand for."""
    floats = tiny_models.write("gpt_oss_window", directory / "floats")
    weights, stored = load_file(floats / "model.safetensors"), {}
    for name, weight in weights.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            blocks, scales, said = packed(weight)
            weights[name] = said.contiguous()
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            stored[name] = weight
    save_file(weights, floats / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((floats / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (directory / "packed").mkdir()
    (directory / "packed" / "config.json").write_text(json.dumps(config))
    save_file(stored, directory / "packed" / "model.safetensors", metadata={"format": "pt"})
    return directory / "packed", floats


def test_experts_are_the_floats_that_their_codes_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, floats = write(tmp_path)
    check_quantization(directory)
    runner = load_runner(directory, num_slots=256)
    assert "MXFP4 weights" in caplog.text
    for got, expected in zip(
        logits_of(runner, 1), logits_of(load_runner(floats, num_slots=256), 1), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert runner.shape.expert_share == 0.5


def test_what_lacks_codes_is_refused(tmp_path: Path) -> None:
    directory, _ = write(tmp_path)
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if name.endswith("layers.0.mlp.experts.down_proj_blocks")]:
        del weights[name]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel):
        load_runner(directory, num_slots=256)


def test_they_cannot_be_rounded_besides(tmp_path: Path) -> None:
    directory, _ = write(tmp_path)
    with pytest.raises(UnsupportedModel, match="its weights are quantized"):
        load_runner(directory, num_slots=256, quantization="fp8")
