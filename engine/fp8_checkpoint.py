"""Reads checkpoints with weights of eight bits into Transformers models.

Transformers' own layers for them fetch kernels from the hub at the first forward, need a GPU of compute
capability 8.9, and round rows to eight bits, too.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.checkpoint import Checkpoint, UnreadableCheckpoint
from engine.fp8 import BLOCK
from engine.fp8_module import StoredFp8Linear

# Scales of what is not quantized here (rows, keys and values), and what models make themselves.
_UNUSED = re.compile(
    r"\.(input_scale|activation_scale|input_scale_ub|[qkv]_scale|kv_scale|output_scale|prob_output_scale"
    r"|rotary_emb\.inv_freq)$"
)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def why_not_read(checkpoint: Checkpoint, config: Any, *, trust_remote_code: bool = False) -> str | None:
    """What keeps `load` from reading a checkpoint of FP8 weights; None if nothing that its names show."""
    try:
        layers = checkpoint.layers()
    except UnreadableCheckpoint as error:
        return str(error)
    if not layers:
        return "none of its weights has e4m3 numbers"
    if trust_remote_code and getattr(config, "auto_map", None):
        return "its code comes with it"
    try:
        model = _skeleton(config, torch.bfloat16, "eager")
    except (ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        return f"Transformers cannot build it: {error}"
    unknown = sorted(_used(checkpoint, model) - set(model.state_dict()) - set(layers.values()))
    if unknown:
        return f"`{unknown[0]}` is no tensor of the model that Transformers builds"
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    other = sorted(set(layers) - linear)
    if other:
        return f"`{other[0]}` has FP8 weights and is no linear layer"
    if getattr(config, "tie_word_embeddings", False):
        head = model.get_output_embeddings()
        if any(model.get_submodule(name) is head for name in layers):
            return "its output projection is FP8 and tied to the embedding"
    return None


def block_of(config: Any) -> tuple[int, int]:
    """Rows and columns that share a scale, by a Transformers configuration, if its scales are per block."""
    described = _quantization(config)
    block: Any = described.get("weight_block_size")
    for group in (described.get("config_groups") or {}).values():  # compressed-tensors
        weights = group.get("weights") or {}
        if block is None and weights.get("block_structure"):
            block = weights["block_structure"]
        if block is None and weights.get("strategy") == "group":
            block = (1, weights["group_size"])
    if isinstance(block, str):
        block = block.lower().split("x")
    return (int(block[0]), int(block[1])) if block else (BLOCK, BLOCK)


def load(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, attention: str = "eager"
) -> PreTrainedModel:
    """The model of a checkpoint, on the CPU: FP8 weights as they are, the others in `dtype`.

    Args:
        checkpoint: one for which `why_not_read` is None.
        config: its Transformers configuration.
        dtype: of what is not quantized, and of what is computed.
        attention: implementation in Transformers.

    Raises:
        UnreadableCheckpoint: if a tensor is missing, or has another shape or type.
    """
    layers, directory = checkpoint.layers(), checkpoint.directory
    model = _skeleton(config, dtype, attention)
    rest = _used(checkpoint, model)
    for module, scales in layers.items():
        own = {name: f"{module}.{name}" for name in ("weight", "bias") if f"{module}.{name}" in rest}
        rest -= {*own.values(), scales}
        bias = checkpoint.read(own["bias"]).to(dtype) if "bias" in own else None
        try:
            scale = _scales(checkpoint.read(scales), config)
            layer = StoredFp8Linear(checkpoint.read(own["weight"]), scale, bias, block_of(config))
            _put(model, module, layer)
        except ValueError as error:
            raise UnreadableCheckpoint(f"`{module}` in {directory}: {error}") from None
    exact = model._keep_in_fp32_modules_strict or ()  # of routers, say
    tensors = {name: checkpoint.read(name) for name in rest}
    tensors = {
        name: one.to(torch.float32 if any(part in name for part in exact) else dtype)
        if one.dtype in _FLOATS
        else one
        for name, one in tensors.items()
    }
    try:
        missing = model.load_state_dict(tensors, strict=False, assign=True).missing_keys
    except RuntimeError as error:
        raise UnreadableCheckpoint(f"{directory}: {error}") from None
    model.tie_weights()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    lacking = [name for name in missing if name not in parameters or parameters[name].is_meta]
    lacking = [name for name in lacking if not _matches(model._keys_to_ignore_on_load_missing, name)]
    if lacking:
        raise UnreadableCheckpoint(f"`{lacking[0]}` is missing in {directory}")
    settings = directory / "generation_config.json"
    if settings.is_file() and model.can_generate():
        model.generation_config = type(model.generation_config).from_pretrained(directory)
    return model


def _used(checkpoint: Checkpoint, model: PreTrainedModel) -> set[str]:
    """Names of the tensors that are read."""
    ignored = model._keys_to_ignore_on_load_unexpected
    return {name for name in checkpoint.names if not _UNUSED.search(name) and not _matches(ignored, name)}


def _matches(patterns: Any, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _skeleton(config: Any, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model without its weights; the buffers it makes itself are there."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    with init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            plain, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    return model


def _quantization(config: Any) -> dict[str, Any]:
    described = getattr(config, "quantization_config", None) or {}
    found: dict[str, Any] = described if isinstance(described, dict) else described.to_dict()
    return found


def _scales(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Scales as what they are, where bytes stand for exponents."""
    if tensor.dtype == torch.uint8 and _quantization(config).get("scale_fmt") == "ue8m0":
        return tensor.view(torch.float8_e8m0fnu)
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
