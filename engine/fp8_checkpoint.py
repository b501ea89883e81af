"""Reads checkpoints with weights of eight bits into Transformers models.

Transformers' own layers for them fetch kernels from the hub at the first forward, need a GPU of compute
capability 8.9, and round rows to eight bits, too.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.fp8 import BLOCK
from engine.fp8_module import StoredFp8Linear

#: How checkpoints call a weight's scales: fine-grained FP8 (DeepSeek, Qwen); compressed-tensors and FBGEMM.
SCALES = ("weight_scale_inv", "weight_scale")
# Scales of what is not quantized here: rows before a product, keys and values.
_UNUSED = re.compile(r"\.(input_scale|activation_scale|input_scale_ub|[qkv]_scale|output_scale)$")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class UnreadableCheckpoint(ValueError):
    """A checkpoint that is not what its configuration says; the message says where."""


def tensor_files(directory: Path) -> dict[str, Path]:
    """Which file of a model directory holds which tensor."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            found.update(dict.fromkeys(content.keys(), file))
    return found


def fp8_layers(directory: Path) -> dict[str, str]:
    """The modules of a checkpoint whose weight is a matrix of float8_e4m3fn, and the name of its scales."""
    files = tensor_files(directory)
    found = {}
    for name, file in files.items():
        module, _, parameter = name.rpartition(".")
        scales = next((f"{module}.{scale}" for scale in SCALES if f"{module}.{scale}" in files), None)
        if parameter != "weight" or scales is None:
            continue
        with safe_open(file, framework="pt") as content:
            about = content.get_slice(name)
            if about.get_dtype() == "F8_E4M3" and len(about.get_shape()) == 2:
                found[module] = scales
    return found


def why_not_read(directory: Path, config: Any) -> str | None:
    """What keeps `load` from reading a quantized checkpoint; None if nothing that its tensors' names show."""
    layers = fp8_layers(directory)
    if not layers:
        return "none of its weights is a matrix of float8_e4m3fn with scales"
    try:
        with init_empty_weights():
            model = _skeleton(config, torch.bfloat16)
    except (ValueError, KeyError) as error:  # classes that come with the model's directory, say
        return f"Transformers cannot build it: {error}"
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    other = sorted(set(layers) - linear)
    if other:
        return f"{len(other)} of its FP8 weights are of no linear layer, `{other[0]}` for one"
    return None


def block_of(config: Any) -> tuple[int, int]:
    """Rows and columns that share a scale, by a Transformers configuration, if its scales are per block."""
    described = config.quantization_config
    described = described if isinstance(described, dict) else described.to_dict()
    block = described.get("weight_block_size")
    for group in (described.get("config_groups") or {}).values():  # compressed-tensors
        block = block or (group.get("weights") or {}).get("block_structure")
    return (int(block[0]), int(block[1])) if block else (BLOCK, BLOCK)


def load(directory: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a checkpoint, on the CPU: FP8 weights as they are, the others in `dtype`.

    Args:
        directory: has the safetensors files.
        config: its Transformers configuration.
        dtype: of what is not quantized, and of what is computed.

    Raises:
        UnreadableCheckpoint: if a tensor is missing, is not known, or has another shape or type.
    """
    files, layers = tensor_files(directory), fp8_layers(directory)
    with init_empty_weights():
        model = _skeleton(config, dtype)
    rest = {name: file for name, file in files.items() if not _UNUSED.search(name)}
    for module, scales in layers.items():
        parts = {name: f"{module}.{name}" for name in ("weight", "bias") if f"{module}.{name}" in rest}
        held = {name: _read(rest.pop(full), full) for name, full in parts.items()}
        scale = _read(rest.pop(scales), scales).float()
        bias = held["bias"].to(dtype) if "bias" in held else None
        try:
            layer = StoredFp8Linear(held["weight"], scale, bias, block_of(config))
            _put(model, module, layer)
        except ValueError as error:
            raise UnreadableCheckpoint(f"`{module}` in {directory}: {error}") from None
    tensors = {name: _read(file, name) for name, file in rest.items()}
    tensors = {name: one.to(dtype) if one.dtype in _FLOATS else one for name, one in tensors.items()}
    try:
        unknown = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:
        raise UnreadableCheckpoint(f"{directory}: {error}") from None
    if unknown:
        raise UnreadableCheckpoint(f"`{unknown[0]}` in {directory} is no tensor of the model")
    model.tie_weights()
    lacking = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lacking:
        raise UnreadableCheckpoint(f"`{lacking[0]}` is missing in {directory}")
    return model


def _skeleton(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(plain, dtype=dtype, attn_implementation="eager")
    return model


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as content:
        tensor: torch.Tensor = content.get_tensor(name)
        return tensor


def _put(model: nn.Module, name: str, layer: StoredFp8Linear) -> None:
    """Put a layer in the place of the one of that name.

    Raises:
        ValueError: if it has another shape.
    """
    parent, _, own = name.rpartition(".")
    place = model.get_submodule(parent)
    before = getattr(place, own)
    if before.weight.shape != layer.weight.shape:
        raise ValueError(f"{list(layer.weight.shape)} where the model has {list(before.weight.shape)}")
    if (before.bias is None) != (layer.bias is None):
        raise ValueError("a bias is missing" if layer.bias is None else "a bias too many")
    setattr(place, own, layer)
