"""How the weights of a checkpoint are read: as they are, of eight bits, or by Transformers' quantizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from engine import fp8_checkpoint

Quantization = Literal["fp8"]
#: `plain` floats; `fp8` kept in eight bits by us; or whatever Transformers does for the checkpoint.
Route = Literal["plain", "fp8", "transformers"]

#: Fine-grained FP8 as Transformers calls it: what its own layers are good for here (experts, for one).
_FP8 = "fp8"
_FP8_FROM = (8, 9)


class UnsuitableWeights(ValueError):
    """A quantized checkpoint that cannot be run there; the message says why."""


def quantization_method(config: Any) -> str | None:
    """How the weights of a Transformers configuration are quantized; None if they are not."""
    described = getattr(config, "quantization_config", None)
    if described is None:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else described.quant_method
    return str(getattr(method, "value", method))


def route_of(directory: Path, config: Any, device: torch.device, *, is_sharded: bool) -> Route:
    """How to read the weights in `directory`.

    Args:
        directory: of the checkpoint.
        config: its Transformers configuration.
        device: where it will run.
        is_sharded: Transformers cuts it into the ranks' shares while it loads, which it does its own way.

    Raises:
        UnsuitableWeights: if they cannot be run there.
    """
    method = quantization_method(config)
    if method is None:
        return "plain"
    unread = fp8_checkpoint.why_not_read(directory, config)
    if unread is None and not is_sharded:
        return "fp8"
    if method != _FP8:
        raise UnsuitableWeights(
            f"its weights are quantized by `{method}` ({unread or 'which one process can run'}); use the "
            "checkpoint without quantization, or one whose linear layers are FP8 (e4m3)"
        )
    why = f"its FP8 weights are left to Transformers ({unread or 'the Hugging Face runner, over ranks'})"
    if device.type != "cuda":
        raise UnsuitableWeights(
            f"{why}, which needs a GPU, and it would run on {device}; use the bfloat16 one"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_FROM:
        raise UnsuitableWeights(
            f"{why}, which needs a GPU of compute capability {_FP8_FROM[0]}.{_FP8_FROM[1]} (Ada, Hopper) or "
            f"later; this one has {capability[0]}.{capability[1]}"
        )
    return "transformers"
