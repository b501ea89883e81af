"""How the weights of a checkpoint are read: floats, quantized ones as they are, or by Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from engine.checkpoint import Checkpoint
from engine.quantized_checkpoint import quantization_of, why_not_read
from engine.quantized_files import (
    FP8,
    MXFP4,
    UnsuitableWeights,
    leaves_weights,
    refused_format,
    undescribed,
)
from engine.stored_layers import are_quantized
from engine.tensor_headers import UnreadableCheckpoint

Quantization = Literal["fp8", "int4"]
"""What weights of floats are rounded to: e4m3 numbers, or integers of four bits."""
#: `plain` floats; `quantized` ones, kept so by us; whatever Transformers does for the checkpoint; or
#: `widened` to floats by it.
Route = Literal["plain", "quantized", "transformers", "widened"]

_FP8_FROM = (8, 9)


def route_of(
    directory: Path,
    config: Any,
    device: torch.device,
    *,
    is_sharded: bool = False,
    trust_remote_code: bool = False,
) -> Route:
    """How to read the weights in `directory`; what its tensors are decides, not what its format is called.

    Args:
        directory: of the checkpoint.
        config: its Transformers configuration.
        device: where it will run.
        is_sharded: Transformers cuts it into the ranks' shares while it loads, which it does its own way.
        trust_remote_code: run code that the directory names.

    Raises:
        UnsuitableWeights: if they cannot be run there.
    """
    described = quantization_of(config)
    method = described.get("quant_method")
    method = getattr(method, "value", method)
    try:
        checkpoint = Checkpoint(directory)
        if leaves_weights(described) and not are_quantized(checkpoint):
            return "plain"
    except UnreadableCheckpoint as error:
        if not described:
            return "plain"
        raise UnsuitableWeights(str(error)) from None
    except (OSError, SafetensorError, KeyError) as error:
        raise UnsuitableWeights(f"its weights cannot be read: {error}") from None
    unread = why_not_read(checkpoint, config, trust_remote_code=trust_remote_code)
    if unread is None and not is_sharded:
        return "quantized"
    why = unread or "over ranks only the lean runner reads them"
    if not described:
        raise undescribed(why)
    if method == MXFP4:
        return "widened"
    if method != FP8:
        raise refused_format(method, why)
    if device.type != "cuda":
        raise UnsuitableWeights(
            f"{why}; so its weights are left to Transformers, which needs a GPU for them, and it would run "
            f"on {device}: use the checkpoint without quantization"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_FROM:
        raise UnsuitableWeights(
            f"{why}; so its weights are left to Transformers, which needs a GPU of compute capability "
            f"{_FP8_FROM[0]}.{_FP8_FROM[1]} (Ada, Hopper) or later for them; this one has "
            f"{capability[0]}.{capability[1]}"
        )
    return "transformers"
