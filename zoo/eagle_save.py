"""Write a trained EAGLE-3 draft layer in the layout of the EAGLE repository, and read it again."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.eagle_config import CONFIG
from zoo.eagle_model import EagleModel

WEIGHTS = "model.safetensors"
_KEPT = (
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
)


def save(directory: Path, eagle: EagleModel, target: str, target_sha256: str) -> None:
    """Write weights in float16; embeddings and output projection, which are the target's, are left out."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: x.to(torch.float16) for name, x in eagle.state_dict().items()}, directory / WEIGHTS)
    of_target = eagle.config.to_dict()
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": of_target["vocab_size"],
        **{name: of_target[name] for name in _KEPT},
        "target": target,
        "target_sha256": target_sha256,
    }
    text = json.dumps(described, indent=2, sort_keys=True)
    (directory / CONFIG).write_text(f"{text}\n", encoding="utf-8")


def load(directory: Path, eagle: EagleModel) -> EagleModel:
    """Put the weights in ``directory`` into ``eagle``, in float32."""
    eagle.load_state_dict({name: x.float() for name, x in load_file(directory / WEIGHTS).items()})
    return eagle.eval()
