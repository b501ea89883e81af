"""Checkpoints with weights of integers, as the field publishes them, of the tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.engine import tiny_models

Format = Literal[
    "gptq",
    "gptq-v2",
    "gptq-mislabelled",
    "gptq-asymmetric",
    "gptq-ordered",
    "gptq-8",
    "gptq-auto-round",
    "awq",
    "packed",
    "packed-asymmetric",
    "packed-old-zeros",
    "packed-channel",
    "packed-ordered",
    "int8",
    "int8-asymmetric",
]
#: Inputs that share a scale: few, so that the tiny models' matrices have several groups.
GROUP = 16
_ASYMMETRIC = frozenset(
    {"gptq-asymmetric", "gptq-v2", "gptq-auto-round", "awq"}
    | {"packed-asymmetric", "packed-old-zeros", "int8-asymmetric"}
)
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)

Int64 = NDArray[np.int64]


def write(name: str, format: Format, directory: Path) -> dict[str, NDArray[np.float32]]:
    """Save the named tiny model in `directory`, its layers' matrices as integers; returns what these mean."""
    tiny_models.write(name, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    meant = {}
    for layer in [*tiny_models.layers(name), *tiny_models.experts_in(tensors)]:
        if len(tensors[f"{layer}.weight"]) == 1:  # a gate of one output fills no word
            continue
        weight = tensors.pop(f"{layer}.weight").numpy()
        made, meant[layer] = _stored(weight, format)
        tensors |= {f"{layer}.{part}": torch.from_numpy(found) for part, found in made.items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": described(format)}))
    return meant


def described(format: Format) -> dict[str, Any]:
    """What config.json says of it."""
    bits = 8 if format == "gptq-8" else 4
    if format == "gptq-auto-round":
        return {"quant_method": "auto-round", "sym": False, "packing_format": "auto_round:gptqmodel"}
    if format.startswith("gptq"):
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": GROUP,
            "desc_act": format == "gptq-ordered",
            "sym": format in ("gptq", "gptq-mislabelled", "gptq-8"),
            "checkpoint_format": "gptq_v2" if format == "gptq-v2" else "gptq",
        }
    if format == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    weights = {"num_bits": 4 if format.startswith("packed") else 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if format.startswith("packed") else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def _stored(
    weight: NDArray[np.float32], format: Format
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """Tensors of a matrix [outputs, inputs], and the matrix that they mean."""
    outputs, inputs = weight.shape
    bits = 8 if format in ("gptq-8", "int8", "int8-asymmetric") else 4
    is_whole = format in ("packed-channel", "int8", "int8-asymmetric")
    groups = 1 if is_whole else inputs // GROUP
    group_of = np.arange(inputs) * groups // inputs
    if format.endswith("ordered"):  # by what layers get as their input, which some have in common
        group_of = np.random.default_rng(inputs).permutation(group_of)
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    scales = np.empty((outputs, groups), np.float32)
    zeros = np.full((outputs, groups), middle)
    for group in range(groups):
        part = weight[:, group_of == group]
        if format in _ASYMMETRIC:
            low = np.minimum(part.min(1), 0)
            scales[:, group] = (np.maximum(part.max(1), 0) - low) / top
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 1, top)
        else:
            scales[:, group] = np.abs(part).max(1) / (middle - 0.5)
    scales = scales.astype(np.float16).astype(np.float32)
    each, zero = scales[:, group_of], zeros[:, group_of]
    numbers = np.clip(np.round(weight / each) + zero, 0, top).astype(np.int64)
    meant = ((numbers - zero) * each).astype(np.float32)
    half = scales.astype(np.float16)
    order = group_of.astype(np.int32)
    if format.startswith("gptq"):
        is_v2 = format in ("gptq-v2", "gptq-mislabelled", "gptq-auto-round")
        made: dict[str, NDArray[Any]] = {
            "qweight": words(numbers, bits).T,
            "qzeros": words((zeros if is_v2 else zeros - 1).T, bits),
            "scales": half.T,
            "g_idx": order,
        }
        # Some tools store a bias of zeros for every layer.
        return (made | {"bias": np.zeros(outputs, np.float16)} if format == "gptq" else made), meant
    if format == "awq":
        made = {"qweight": awq_words(numbers.T), "qzeros": awq_words(zeros.T), "scales": half.T}
        return made, meant
    if format.startswith("int8"):
        made = {"weight": (numbers - 128).astype(np.int8), "weight_scale": scales}
        if format == "int8-asymmetric":
            made["weight_zero_point"] = (zeros - 128).astype(np.int8)
        return made, meant
    made = {
        "weight_packed": words(numbers, bits),
        "weight_scale": half,
        "weight_shape": np.array(weight.shape, np.int64),
    }
    if format == "packed-asymmetric":
        made["weight_zero_point"] = words(zeros.T, bits).T
    if format == "packed-old-zeros":  # before compressed-tensors packed them
        made["weight_zero_point"] = (zeros - middle).astype(np.int8)
    if format == "packed-ordered":
        made["weight_g_idx"] = order
    return made, meant


def words(numbers: Int64, bits: int) -> NDArray[np.int32]:
    """int32 [rows, words] of [rows, numbers], the first in the lowest bits."""
    each = 32 // bits
    rows, columns = numbers.shape
    found = np.zeros((rows, -(-columns // each)), np.int64)
    for column in range(columns):
        found[:, column // each] |= numbers[:, column] << bits * (column % each)
    return found.astype(np.uint32).view(np.int32)


def awq_words(numbers: Int64) -> NDArray[np.int32]:
    """int32 [rows, words] of [rows, outputs], by AWQ's order."""
    rows, outputs = numbers.shape
    found = np.zeros((rows, outputs // 8), np.int64)
    for word in range(outputs // 8):
        for place, output in enumerate(_AWQ_OUTPUTS):
            found[:, word] |= numbers[:, 8 * word + output] << 4 * place
    return found.astype(np.uint32).view(np.int32)
