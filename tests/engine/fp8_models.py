"""Checkpoints with weights of eight bits, as the field publishes them, of the tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from tests.engine import tiny_models

Format = Literal["fine-grained", "channel", "tensor", "fbgemm"]
#: Of the fine-grained ones: small, so that the tiny models' matrices have several blocks.
BLOCK = (16, 16)
_LARGEST = 448.0
_CONFIGS: dict[Format, dict[str, Any]] = {
    "fine-grained": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(BLOCK),
    },
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    },
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []},
}
_CONFIGS["tensor"] = _CONFIGS["channel"]


def write(name: str, format: Format, directory: Path) -> Path:
    """Save the named tiny model in `directory`, its layers' matrices in eight bits."""
    tiny_models.write(name, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for layer in [*tiny_models.layers(name), *tiny_models.experts_in(tensors)]:
        weight = tensors[f"{layer}.weight"]
        numbers, scales = _in_eight_bits(weight, format)
        tensors[f"{layer}.weight"] = numbers
        tensors[f"{layer}.weight_scale" + ("_inv" if format == "fine-grained" else "")] = scales
        if format == "tensor":  # static scales of rows, which these checkpoints have
            tensors[f"{layer}.input_scale"] = torch.ones(1)
    save_file(tensors, file, metadata={"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": _CONFIGS[format]}))
    return directory


def _in_eight_bits(weight: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    if format == "fine-grained":
        rows, columns = (-(-size // side) for size, side in zip(weight.shape, BLOCK, strict=True))
        scales = torch.empty(rows, columns)
        whole = torch.empty_like(weight)
        for row in range(rows):
            for column in range(columns):
                part = (
                    slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
                    slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
                )
                scales[row, column] = weight[part].abs().max() / _LARGEST
                whole[part] = weight[part] / scales[row, column]
        return whole.to(torch.float8_e4m3fn), scales
    if format == "tensor":
        scales = (weight.abs().max() / _LARGEST).reshape(1)
    else:
        scales = (weight.abs().amax(1, keepdim=True) / _LARGEST).to(torch.bfloat16)
    return (weight / scales.float()).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales
