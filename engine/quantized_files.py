"""Which quantized checkpoints cannot be run anywhere, known from their files without importing torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

#: As Transformers calls the format whose weights it can run itself, on some devices.
FP8 = "fp8"
#: And one that it widens while it reads it (gpt-oss).
MXFP4 = "mxfp4"
#: How weights that are read here are told, as `engine.stored_layers` tells them: by the ends of their names,
#: or by what safetensors calls their numbers, these only with scales.
_READ_NAMES = (".qweight", ".weight_packed")
_READ_KIND, _READ_SCALED = "F8_E4M3", "I8"
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


def check_quantization(directory: Path) -> None:
    """Refuse what `engine.quantization.route_of` would refuse on every device, long before it is loaded.

    What cannot be read here is left to it, and to what it says.

    Raises:
        UnsuitableWeights: if config.json names another format than FP8 and MXFP4, and no weight is in one
            that is read.
    """
    try:
        described = description_in(json.loads((directory / "config.json").read_text()))
        method = described["quant_method"]
        if method in (FP8, MXFP4) or leaves_weights(described):
            return
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    files = sorted(directory.glob("*.safetensors"))
    try:
        if not files or any(map(_has_read, files)):
            return
    except (OSError, SafetensorError):
        return
    raise refused_format(method, NOTHING_READ)


def _has_read(file: Path) -> bool:
    with safe_open(file, framework="numpy") as opened:  # reads the header
        names = set(opened.keys())
        kinds = {name: opened.get_slice(name).get_dtype() for name in names}
    return any(
        name.endswith(_READ_NAMES)
        or kind == _READ_KIND
        or (kind == _READ_SCALED and f"{name}_scale" in names)
        for name, kind in kinds.items()
    )
