"""Write a trained adapter in the file format of the PEFT library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.adapter_config import CONFIG, WEIGHTS
from engine.adapter_files import DOWN, PREFIX, UP
from zoo.adapter_model import ALPHA, MODULES, RANK, AdaptedLinear


def save(directory: Path, adapted: Mapping[str, AdaptedLinear], base: str) -> None:
    """Write the adapters, in float16, and their description.

    Args:
        directory: made if it is not there.
        adapted: by the layer's name in the model, as ``adapt`` returns them.
        base: name of the model that they were trained for.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"{PREFIX}{name}{DOWN}": layer.down for name, layer in adapted.items()}
    tensors |= {f"{PREFIX}{name}{UP}": layer.up for name, layer in adapted.items()}
    halves = {name: x.detach().to("cpu", torch.float16).contiguous() for name, x in tensors.items()}
    save_file(halves, directory / WEIGHTS, metadata={"format": "pt"})
    # Fields that PEFT has written for years: later ones may be missing, and older versions would refuse them.
    described: dict[str, object] = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": RANK,
        "rank_pattern": {},
        "revision": None,
        "target_modules": list(MODULES),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    text = json.dumps(described, indent=2, sort_keys=True)
    (directory / CONFIG).write_text(f"{text}\n", encoding="utf-8")
