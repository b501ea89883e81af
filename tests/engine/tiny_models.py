"""Random tiny models in every shape the engine's tests need, written as Hugging Face directories."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MORE_EXPERTS: dict[str, Any] = {
    **_EXPERTS,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [4.0, 8.0, 16.0, 32.0],
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_scaled": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_dynamic": ("Llama", {"rope_parameters": {**_LLAMA3_ROPE, "rope_type": "dynamic"}}),
    "llama_odd": ("Llama", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama_least": (
        "Llama",
        {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    # One layer of two is a mixture; with an expert for all rows; probabilities that are not scaled.
    "qwen2_moe": ("Qwen2Moe", {**_MORE_EXPERTS, "mlp_only_layers": [0]}),
    "qwen3_moe": ("Qwen3Moe", {**_MORE_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "mistral_window": ("Mistral", {"sliding_window": 64}),
    "gemma3_window": ("Gemma3Text", {"head_dim": 16, "sliding_window": 64, "layer_types": _ALTERNATING}),
    "gemma2_window": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 64, "attn_logit_softcapping": 0.3},
    ),
    "gpt_oss_window": (
        "GptOss",
        {
            "head_dim": 16,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "layer_types": _ALTERNATING,
        },
    ),
    "qwen2_moe_window": (
        "Qwen2Moe",
        {**_EXPERTS, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    ),
    "phimoe_window": ("Phimoe", {**_EXPERTS, "sliding_window": 64}),
    "phi3_longrope": ("Phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32}),
    "gpt_neox": ("GPTNeoX", {}),
    "gemma4": (
        "Gemma4Text",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 4096,
            "layer_types": _ALTERNATING,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "falcon": ("Falcon", {"new_decoder_architecture": False, "alibi": False}),
}


def build(name: str) -> Any:
    """A randomly initialised model of the named configuration, float32, in evaluation mode."""
    family, options = _CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **options})
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Initial norm scales of one and biases of zero would hide that they are ignored.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write(name: str, directory: Path) -> Path:
    """Save the named model in `directory`, which is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in _files(name).items():
        (directory / file).write_bytes(content)
    torch.manual_seed(0)  # whether it was built just now or before
    return directory


@functools.cache
def layers(name: str) -> list[str]:
    """Names of the linear layers of the named model, but for the one that gives logits."""
    model = build(name)
    head = model.get_output_embeddings()
    return [n for n, m in model.named_modules() if type(m) is nn.Linear and m is not head]


def experts_in(tensors: Collection[str]) -> list[str]:
    """Names of the linear layers of experts in a checkpoint with these tensors."""
    return [name.removesuffix(".weight") for name in tensors if ".experts." in name]


@functools.cache
def _files(name: str) -> dict[str, bytes]:
    """What is saved of it, by file; to build and save it takes twenty times as long as to write these."""
    with tempfile.TemporaryDirectory() as directory:
        build(name).save_pretrained(directory)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir()}
