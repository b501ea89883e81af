"""Which quantized checkpoints cannot be run anywhere, known from their files without importing torch."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

#: As Transformers calls the format whose weights it can run itself, on some devices.
FP8 = "fp8"
#: As safetensors calls the numbers that are read here (`engine.fp8_checkpoint`).
_READ = "F8_E4M3"


class UnsuitableWeights(ValueError):
    """A quantized checkpoint that cannot be run there; the message says why."""


def refused_format(method: str, why: str) -> UnsuitableWeights:
    """That of a checkpoint in a format that is not read."""
    return UnsuitableWeights(
        f"its weights are quantized by `{method}`, and {why}; use the checkpoint without quantization, "
        "or one whose linear layers are FP8 (e4m3)"
    )


def check_quantization(directory: Path) -> None:
    """Refuse what `engine.quantization.route_of` would refuse on every device, long before it is loaded.

    What cannot be read here is left to it, and to what it says.

    Raises:
        UnsuitableWeights: if config.json names another format than FP8, and no weight is in e4m3 numbers.
    """
    try:
        described = json.loads((directory / "config.json").read_text())["quantization_config"]
        method = described["quant_method"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if method == FP8:
        return
    files = sorted(directory.glob("*.safetensors"))
    try:
        if not files or any(map(_has_e4m3, files)):
            return
    except (OSError, SafetensorError):
        return
    raise refused_format(method, "none of its weights has e4m3 numbers")


def _has_e4m3(file: Path) -> bool:
    with safe_open(file, framework="numpy") as opened:  # reads the header
        names = opened.keys()
        return any(opened.get_slice(name).get_dtype() == _READ for name in names)
