"""Weights in fewer bits: which quantized checkpoints can be run where."""

from __future__ import annotations

from typing import Any

import torch

#: Fine-grained FP8 (a scale per block of a weight), as DeepSeek-V3, Qwen3-FP8 and others are published.
FP8 = "fp8"
_FP8_FROM = (8, 9)


def quantization_method(config: Any) -> str | None:
    """How the weights of a Transformers configuration are quantized; None if they are not."""
    described = getattr(config, "quantization_config", None)
    if described is None:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else described.quant_method
    return str(getattr(method, "value", method))


def why_not_quantized(config: Any, device: torch.device) -> str | None:
    """What keeps a quantized checkpoint from running on `device`; None if nothing, or it is not quantized."""
    method = quantization_method(config)
    if method is None:
        return None
    if method != FP8:
        return (
            f"its weights are quantized by `{method}`, of which nothing was tried here; use the checkpoint "
            f"without quantization, or a fine-grained FP8 one (`quant_method: {FP8}`)"
        )
    if device.type != "cuda":
        return f"its weights are FP8, which needs a GPU, and it would run on {device}; use the bfloat16 one"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_FROM:
        return (
            f"its weights are FP8, which needs a GPU of compute capability {_FP8_FROM[0]}.{_FP8_FROM[1]} "
            f"(Ada, Hopper) or later; this one has {capability[0]}.{capability[1]}"
        )
    return None
