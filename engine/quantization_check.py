"""Which quantized checkpoints cannot be run anywhere, known from their files without importing torch."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from engine.model_files import BrokenFiles, read_json, weight_files
from engine.quantized_files import (
    FP8,
    MXFP4,
    description_in,
    leaves_weights,
    refused_format,
    undescribed,
)
from engine.stored_layers import are_quantized, why_not_stored
from engine.tensor_headers import TensorHeaders


def check_quantization(directory: Path) -> None:
    """Refuse what `engine.quantization.route_of` would refuse on every device, long before it is loaded.

    What cannot be read here is left to it, and to what it says.

    Raises:
        UnsuitableWeights: if weights are quantized in a format or to a number of bits that is not read, and
            Transformers cannot run them itself on some device either.
    """
    try:
        described = description_in(read_json(directory / "config.json")) or {}
        method = described.get("quant_method")
        files = weight_files(directory)
        if method in (FP8, MXFP4) or not files:
            return
        headers = TensorHeaders(files)
        if leaves_weights(described) and not are_quantized(headers):
            return
        why = why_not_stored(headers, described)
    except (BrokenFiles, OSError, SafetensorError, TypeError, AttributeError):
        return
    if why is not None:
        raise refused_format(method, why) if described else undescribed(why)
