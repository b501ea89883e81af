"""A Llama of two small layers with random weights."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def random_llama(seed: int, **fields: float) -> LlamaForCausalLM:
    """The model with these fields of its configuration besides its shape; the seed decides the weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **fields,
    )
    return LlamaForCausalLM(config).eval()
