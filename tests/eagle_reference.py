"""An EAGLE-3 drafter of random weights in a directory, and what it drafts, written out a row at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from engine.eagle_config import feature_layers

EPS = 1e-6


class EagleReference:
    """The drafter of a target, with the variants that published ones have.

    Attributes:
        config: its `config.json`.
        weights: its tensors, by the names of the EAGLE repository.
    """

    def __init__(
        self,
        target: LlamaForCausalLM,
        *,
        width: int | None = None,
        draft_tokens: Sequence[int] | None = None,
        own_embeddings: bool = False,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        norm_output: bool = False,
        layers: tuple[int, ...] = (),
        seed: int = 0,
    ) -> None:
        """Random weights; `draft_tokens` are the target's tokens that it drafts, ascending, all if None."""
        generator = torch.Generator().manual_seed(seed)
        hidden, vocab = target.config.hidden_size, target.config.vocab_size
        self.width = width = width or hidden
        self.target = target
        self.heads, self.kv_heads, self.dim = 4, 2, 8
        self.layers = layers or feature_layers(target.config.num_hidden_layers)
        self.options = (norm_before_residual, norm_before_fc, norm_output)
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], _Rows] = {}
        self.tokens = list(draft_tokens) if draft_tokens is not None else list(range(vocab))

        def random(*shape: int, scale: float = 0.4) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * scale

        def gains(size: int) -> torch.Tensor:
            return 1.0 + random(size, scale=0.2)

        units, m = 24, "midlayer"
        self.weights = {
            "fc.weight": random(width, 3 * hidden),
            f"{m}.input_layernorm.weight": gains(width),
            f"{m}.hidden_norm.weight": gains(width),
            f"{m}.self_attn.q_proj.weight": random(self.heads * self.dim, 2 * width),
            f"{m}.self_attn.k_proj.weight": random(self.kv_heads * self.dim, 2 * width),
            f"{m}.self_attn.v_proj.weight": random(self.kv_heads * self.dim, 2 * width),
            f"{m}.self_attn.o_proj.weight": random(width, self.heads * self.dim),
            f"{m}.post_attention_layernorm.weight": gains(width),
            f"{m}.mlp.gate_proj.weight": random(units, width),
            f"{m}.mlp.up_proj.weight": random(units, width),
            f"{m}.mlp.down_proj.weight": random(width, units),
            "norm.weight": gains(width),
        }
        if norm_before_fc:
            self.weights["input_norm.weight"] = gains(3 * hidden)
        if draft_tokens is not None or width != hidden:
            self.weights["lm_head.weight"] = random(len(self.tokens), width)
            self.weights["d2t"] = torch.tensor(self.tokens) - torch.arange(len(self.tokens))
            self.weights["t2d"] = torch.tensor([token in set(self.tokens) for token in range(vocab)])
        if own_embeddings or width != hidden:
            self.weights["embed_tokens.weight"] = random(vocab, width)
        self.config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": width,
            "intermediate_size": units,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "hidden_act": "silu",
            "max_position_embeddings": 64,
            "rms_norm_eps": EPS,
            "rope_theta": 5000.0,
            "vocab_size": vocab,
            "draft_vocab_size": len(self.tokens),
            "target_hidden_size": hidden,
            "norm_before_residual": norm_before_residual,
            "norm_before_fc": norm_before_fc,
            "norm_output": norm_output,
        }
        if layers:
            self.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}

    def write(self, directory: Path) -> Path:
        """As the EAGLE repository's checkpoints."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file({name: x.contiguous() for name, x in self.weights.items()}, directory / "model.safetensors")
        return directory

    @torch.no_grad()
    def logits(self, committed: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """float32 [target's vocabulary] after `committed` and `drafted`, tokens not drafted at -inf.

        From the first time on with the weights of then.
        """
        final = self._after(tuple(committed), tuple(drafted)).final
        head = self.weights.get("lm_head.weight", self.target.get_output_embeddings().weight)
        found = torch.full((self.target.config.vocab_size,), -math.inf)
        found[self.tokens] = (head @ final).float()
        return found

    def _after(self, committed: tuple[int, ...], drafted: tuple[int, ...]) -> _Rows:
        """Once for each path: those that branch off have the rows before in common."""
        rows = self._known.get((committed, drafted))
        if rows is None:
            if drafted:
                before = self._after(committed, drafted[:-1])
                rows = self._row(before, before.hidden, drafted[-1])
            else:
                rows = _Rows((), (), torch.zeros(self.width), torch.zeros(self.width))
                for features, token in zip(self._features(committed[:-1]), committed[1:], strict=True):
                    rows = self._row(rows, self.weights["fc.weight"] @ features, token)
            self._known[committed, drafted] = rows
        return rows

    def _features(self, text: Sequence[int]) -> torch.Tensor:
        """Of what the target has read: all that is committed but the last token."""
        states = self.target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in self.layers], -1)
        _, before_fc, _ = self.options
        return _normed(features, self.weights["input_norm.weight"]) if before_fc else features

    def _row(self, before: _Rows, hidden: torch.Tensor, token: int) -> _Rows:
        """One more, of the hidden state at its position and the token after it."""
        before_residual, _, output = self.options
        w = {name.removeprefix("midlayer."): x for name, x in self.weights.items()}
        embedding = w.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        normed = _normed(hidden, w["hidden_norm.weight"])
        residual = normed if before_residual else hidden
        entered = torch.cat((_normed(embedding[token], w["input_layernorm.weight"]), normed))
        cos, sin = self._rope(entered, torch.tensor([[len(before.keys)]]))

        queries, key, value = (
            (w[f"self_attn.{name}_proj.weight"] @ entered).view(-1, self.dim) for name in "qkv"
        )
        queries, key = (x * cos[0] + rotate_half(x) * sin[0] for x in (queries, key))
        keys, values = (*before.keys, key), (*before.values, value)
        mixed = []
        for head, query in enumerate(queries):
            shared = head // (self.heads // self.kv_heads)
            scores = torch.stack([key[shared] @ query for key in keys]) / math.sqrt(self.dim)
            mixed.append(scores.softmax(0) @ torch.stack([value[shared] for value in values]))
        x = residual + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        normed = _normed(x, w["post_attention_layernorm.weight"])
        gated = F.silu(w["mlp.gate_proj.weight"] @ normed) * (w["mlp.up_proj.weight"] @ normed)
        x = x + w["mlp.down_proj.weight"] @ gated
        final = _normed(x, w["norm.weight"])
        return _Rows(keys, values, final if output else x, final)

    @cached_property
    def _rope(self) -> LlamaRotaryEmbedding:
        described = {k: v for k, v in self.config.items() if k not in ("architectures", "dtype")}
        return LlamaRotaryEmbedding(LlamaConfig(**described))


class _Rows(NamedTuple):
    """Of all rows keys and values; of the last what the next goes on from, and what the head is given."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    hidden: torch.Tensor
    final: torch.Tensor


def _normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * scale
