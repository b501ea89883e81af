"""Mixtures of experts that compute what a dense model does, for measurements of their cost."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint
from zoo.derived import write_derived

# Names of a feed-forward layer's projections as Llama has them, and as Mixtral calls an expert's.
_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# Of a Llama configuration, what Mixtral's does not have.
_LEFT_OUT = ("attention_bias", "mlp_bias", "pretraining_tp")


def upcycle(source: Path, out: Path, num_experts: int, experts_per_token: int, *, seed: int = 0) -> int:
    """Write a Llama model as a Mixtral whose experts are copies of its feed-forward layers.

    Each token is sent to some of them by random weights. What they say is added up with weights that sum to
    1, so logits are those of the source but for rounding, and drafters are right as often as before, while
    forwards read experts as those of a trained mixture do: as many as their tokens are sent to (sparse
    upcycling before any training: Komatsuzaki et al., ICLR 2023).

    Args:
        source: directory of the model, layers named as Transformers does.
        out: directory to write, with the tokenizer of the source.
        num_experts: in each layer.
        experts_per_token: how many of them each token is sent to.
        seed: of the random weights.

    Returns:
        Parameters of the written model.

    Raises:
        ValueError: for more experts per token than there are, or a source with other names or biases.
        FileExistsError: if `out` is there.
    """
    if not 1 <= experts_per_token <= num_experts:
        raise ValueError(f"a token cannot be sent to {experts_per_token} of {num_experts} experts")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    checkpoint = Checkpoint(source)
    names = sorted(checkpoint.names)
    if not any(".mlp.gate_proj." in name for name in names) or any(name.endswith(".bias") for name in names):
        raise ValueError(f"{source}: layers need mlp.gate_proj.weight, and no biases")
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name in names:
        weight = checkpoint.read(name)
        layer, is_expert, part = name.partition(".mlp.")
        if not is_expert:
            weights[name] = weight
            continue
        mixture, own = f"{layer}.block_sparse_moe", _EXPERT[part.removesuffix(".weight")]
        for expert in range(num_experts):
            weights[f"{mixture}.experts.{expert}.{own}.weight"] = weight.clone()
        if own == "w1":
            drawn = torch.randn(num_experts, weight.shape[1], generator=random)
            weights[f"{mixture}.gate.weight"] = drawn.to(weight.dtype)

    changed = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": num_experts,
        "num_experts_per_tok": experts_per_token,
        "sliding_window": None,
    }
    config = {key: value for key, value in config.items() if key not in _LEFT_OUT} | changed
    return write_derived(source, out, config, weights)
