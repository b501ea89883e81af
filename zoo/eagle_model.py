"""EAGLE-3's draft layer while it is trained, with the training-time test (Li et al. 2025, arXiv 2503.01840).

``engine.eagle`` runs the same layer on slots of a KV pool; weights have the published checkpoints' names.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

#: Feed-forward units: half the target's, for the layer is computed once a drafted token and shipped.
UNITS = 512


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        assert isinstance(dim, int)
        self.q_proj = nn.Linear(2 * width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, units = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, units, bias=False)
        self.up_proj = nn.Linear(width, units, bias=False)
        self.down_proj = nn.Linear(units, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to [rows, width]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = _MLP(config)


class EagleModel(nn.Module):
    """The draft layer of a target of this configuration, whose embeddings and output projection it shares."""

    def __init__(self, target: LlamaConfig) -> None:
        """Random weights, but for features that begin as the last of the target's three."""
        super().__init__()
        self.config = config = copy.deepcopy(target)
        config.intermediate_size = UNITS
        width = config.hidden_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self._rotary = LlamaRotaryEmbedding(config)  # it has no weights
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=0.02)
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, 2 * width :] = torch.eye(width)

    def forward(self, features: Tensor, embeds: Tensor, steps: int) -> list[Tensor]:
        """What the output projection is given, [rows, tokens, width], in each of ``steps`` drafted layers.

        In the first, token t is read with the target's features of position t; in layer j with what layer
        j - 1 made of position t - 1, as when drafting, and attends to features up to t - j + 1 and to its
        own earlier layers after them (the paper's training-time test).

        Args:
            features: [rows, tokens, 3 * width], the target's hidden states below three of its layers.
            embeds: [rows, tokens, width], embeddings of the token after each.
            steps: layers of a draft.
        """
        count = features.shape[1]
        layer = self.midlayer
        positions = torch.arange(count, device=features.device)[None]
        rotation = self._rotary(features, positions)
        # Sums and norms are in float32, whatever matrices are multiplied in.
        entered = layer.input_layernorm(embeds.float())
        hidden = self.fc(features).float()
        known: list[tuple[Tensor, Tensor]] = []
        out = []
        for step in range(steps):
            if step:
                hidden = _later(hidden, 1)
            q, k, v = self._heads(torch.cat((entered, layer.hidden_norm(hidden)), -1), rotation)
            known.append((k, v))
            hidden = hidden + layer.self_attn.o_proj(_attend(q, known))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            out.append(self.norm(hidden))
        return out

    def _heads(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [rows, heads, tokens, dim], of as many heads each."""
        attention, config = self.midlayer.self_attn, self.config
        parts = [
            project(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        q, k = apply_rotary_pos_emb(parts[0], parts[1], *rotation)
        shared = config.num_attention_heads // config.num_key_value_heads
        return q, k.repeat_interleave(shared, 1), parts[2].repeat_interleave(shared, 1)


def _later(x: Tensor, by: int) -> Tensor:
    """``x`` [rows, tokens, ...] moved ``by`` tokens to the right, zeros before."""
    return torch.cat((torch.zeros_like(x[:, :by]), x[:, : x.shape[1] - by]), 1)


def _attend(q: Tensor, known: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[rows, tokens, heads * dim]: attention of layer ``len(known)``, whose own keys are the last."""
    count, scale = q.shape[2], 1.0 / math.sqrt(q.shape[3])
    last = len(known) - 1
    k, v = known[0]
    hidden = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1 - last)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
    moved = [
        tuple(_later(x.transpose(1, 2), last - i).transpose(1, 2) for x in pair)
        for i, pair in enumerate(known)
        if i
    ]
    own = [(q * key).sum(-1, keepdim=True) * scale for key, _ in moved]
    weights = torch.cat((scores, *own), -1).softmax(-1)
    mixed = weights[..., :count] @ v
    for i, (_, value) in enumerate(moved):
        mixed = mixed + weights[..., count + i, None] * value
    return mixed.transpose(1, 2).flatten(2)
