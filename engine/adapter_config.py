"""What the directory of a LoRA adapter says of itself, and what of it cannot be served. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model_files import BrokenFiles, check_weights, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings under which an adapter is more than sums of low rank beside linear layers, and what that is.
_BEYOND = {
    "use_dora": "it scales the model's own weights (DoRA)",
    "modules_to_save": "it replaces layers of the model as a whole",
    "use_qalora": "it adds up groups of inputs before it multiplies them (QA-LoRA)",
    "lora_bias": "it adds biases",
    "fan_in_fan_out": "it is of layers whose weights are stored the other way round",
    "layer_replication": "it repeats layers of the model",
    "target_parameters": "it changes weights that are not those of linear layers",
    "trainable_token_indices": "it changes embeddings of tokens",
    "use_bdlora": "its halves are stored as blocks (BD-LoRA)",
    "kasa_config": "it scales what lies between its halves, and goes with changed weights (KaSA)",
    "monteclora_config": "it adds what is drawn in training (MonteCLoRA)",
    "velora_config": "it has what only its training needs beside its halves (VeLoRA)",
    "arrow_config": "it chooses among adapters (Arrow)",
    "alora_invocation_tokens": "it begins in the middle of a prompt (activated LoRA)",
}
# Begun with these, training subtracts from the model's own weights what the adapter starts as.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class UnsuitableAdapter(ValueError):
    """An adapter that is not there, is broken, or cannot be served; the message says why."""


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """The `adapter_config.json` of an adapter whose files are whole, and which can be served.

    Raises:
        UnsuitableAdapter: if there is none.
    """
    if not (directory / CONFIG).is_file():
        raise UnsuitableAdapter(f"no adapter in {directory}: {CONFIG} is missing")
    if not (directory / WEIGHTS).is_file():
        raise UnsuitableAdapter(
            f"no weights in {directory}: {WEIGHTS} is missing (other formats than safetensors may run code "
            "when they are read, and are not loaded)"
        )
    try:
        config = read_json(directory / CONFIG)
        check_weights(directory / WEIGHTS)
        _check_scales(config)
    except BrokenFiles as error:
        raise UnsuitableAdapter(f"cannot read the adapter in {directory}: {error}") from None
    why = _why_not_served(config)
    if why is not None:
        raise UnsuitableAdapter(
            f"the adapter in {directory} cannot be served: {why}; merge it into its model"
        )
    return config


def _check_scales(config: Mapping[str, Any]) -> None:
    """Refuse what no scale can be worked out of.

    Raises:
        BrokenFiles: naming the field.
    """
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, Mapping):
        raise BrokenFiles(f"`alpha_pattern` in {CONFIG} is {patterns!r}, not numbers by patterns of names")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise BrokenFiles(f"{pattern!r} in `alpha_pattern` of {CONFIG} is no pattern: {error}") from None
    scales = {
        "lora_alpha": config.get("lora_alpha", 0),
        **{f"alpha_pattern.{n}": a for n, a in patterns.items()},
    }
    for field, scale in scales.items():
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise BrokenFiles(f"`{field}` in {CONFIG} is {scale!r}, not a number")


def _why_not_served(config: Mapping[str, Any]) -> str | None:
    """What makes it more than sums of low rank; None if nothing does."""
    kind = config.get("peft_type")
    if kind != "LORA":
        return f"its `peft_type` is {kind!r}, not 'LORA'"
    if config.get("bias", "none") != "none":
        return f"it has biases of its own (`bias` {config['bias']!r})"
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        return (
            f"it goes with weights that `init_lora_weights` {start!r} has changed (save it as an ordinary "
            "one, by PEFT's `path_initial_model_for_weight_conversion`)"
        )
    return next((f"{what} (`{field}`)" for field, what in _BEYOND.items() if config.get(field)), None)
