"""Write a trained adapter in the file format of the PEFT library, and add one to a model's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from zoo.adapter_model import ALPHA, MODULES, RANK, AdaptedLinear

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
#: PEFT names a tensor after the layer's place in its own model, which has the adapted one in it.
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


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


@torch.no_grad()
def merge(model: LlamaForCausalLM, directory: Path) -> LlamaForCausalLM:
    """Add alpha / r * B A of what ``save`` wrote to the model's own matrices, in place.

    Raises:
        AttributeError: where the model has no layer of an adapter's name.
    """
    described = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    scale = described["lora_alpha"] / described["r"]
    tensors = {name: x.float() for name, x in load_file(directory / WEIGHTS).items()}
    for name in (name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)):
        weight = model.get_submodule(name.removeprefix(PREFIX)).weight
        weight.add_((scale * tensors[f"{name}{UP}"] @ tensors[f"{name}{DOWN}"]).to(weight))
    return model
