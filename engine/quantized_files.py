"""What configurations say of quantized weights, and how those that are not read are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: As Transformers calls the format whose weights it can run itself, on some devices.
FP8 = "fp8"
#: And one that it widens while it reads it (gpt-oss).
MXFP4 = "mxfp4"
#: Fields of config.json that say how weights are quantized; compressed-tensors called it the second at first.
DESCRIBED_IN = ("quantization_config", "compression_config")
#: What is wrong with a checkpoint without such weights.
NOTHING_READ = "none of its weights is in a format that is read here"


class UnsuitableWeights(ValueError):
    """A quantized checkpoint that cannot be run there; the message says why."""


def refused_format(method: str | None, why: str) -> UnsuitableWeights:
    """That of a checkpoint in a format that is not read; without a method where it names none."""
    by = "in a way not named (config.json has no `quant_method`)" if method is None else f"by `{method}`"
    return UnsuitableWeights(
        f"its weights are quantized {by}, and {why}; use the checkpoint without quantization, "
        "or one whose linear layers are FP8 (e4m3), GPTQ, AWQ or INT8"
    )


def undescribed(why: str) -> UnsuitableWeights:
    """That of a checkpoint with quantized weights of which its configuration says nothing."""
    return UnsuitableWeights(
        f"it has quantized weights, which its config.json does not describe, and {why}; use the "
        "checkpoint without quantization"
    )


def description_in(config: Mapping[str, Any]) -> Any:
    """How the fields of a configuration say that weights are quantized; None if they do not."""
    return next((config[field] for field in DESCRIBED_IN if config.get(field) is not None), None)


def leaves_weights(described: Mapping[str, Any]) -> bool:
    """Whether weights are stored as floats by what a configuration says of quantization, if anything.

    Quantized are keys and values only then, or activations, which are not rounded here; or weights are sparse
    with their zeros stored.
    """
    if not described:
        return True
    method = getattr(described.get("quant_method"), "value", described.get("quant_method"))
    if method == "modelopt":
        return "quant_algo" in described and described["quant_algo"] is None
    about = ("config_groups", "kv_cache_scheme", "sparsity_config")
    return (
        method == "compressed-tensors"
        and not described.keys().isdisjoint(about)
        and (described.get("sparsity_config") or {}).get("format", "dense") == "dense"
        and not described.get("transform_config")
        and not any(group.get("weights") for group in (described.get("config_groups") or {}).values())
    )
