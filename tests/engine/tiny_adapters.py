"""Random LoRA adapters of tiny models, as PEFT writes them; and these models with one merged, the oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ALL = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
)
_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somewhere/else",
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
}


def write(
    model: Path,
    directory: Path,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ALL,
    ranks: Mapping[str, int] = MappingProxyType({}),
    **config: Any,
) -> Path:
    """Save an adapter of all linear layers of `model` whose names end with one of `targets`.

    Layers whose names end with one of `ranks` have that; the scale is that of the others.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in AutoModelForCausalLM.from_pretrained(model).named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            outputs, inputs = module.weight.shape
            own = ranks.get(name.rpartition(".")[2], rank)
            down, up = (
                torch.randn(own, inputs, generator=generator),
                torch.randn(outputs, own, generator=generator),
            )
            tensors[f"base_model.model.{name}.lora_A.weight"] = down / inputs**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = up / 8
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {**_CONFIG, "r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
    if ranks:
        described["rank_pattern"] = dict(ranks)
        described["alpha_pattern"] = {name: alpha / rank * own for name, own in ranks.items()}
    described |= config
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return directory


def merged(model: Path, adapter: Path | None, scale: float = 2.0) -> Any:
    """The Transformers model with W + scale * B A in place of each weight W that the adapter changes."""
    whole = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if adapter is None:
        return whole
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in tensors.items():
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            if module != name.removeprefix("base_model.model."):
                up = tensors[name.replace("lora_A", "lora_B")]
                whole.get_submodule(module).weight += scale * (up.double() @ down.double()).float()
    return whole


@torch.inference_mode()
def logits(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """[tokens, vocab] of the plain forward."""
    found: torch.Tensor = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return found
