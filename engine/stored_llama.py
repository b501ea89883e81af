"""Llama-shaped checkpoints read without Transformers, once it has said how they are to be read."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from engine.checkpoint import Checkpoint

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class StoredConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What Transformers made of a configuration, as far as `LlamaRunner` asks for it, and by its names.

    `inv_freq` [head_dim / 2] and `attention_scaling` are of the model's rotary embedding. Floats survive JSON
    bit for bit.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    inv_freq: list[float]
    attention_scaling: float

    @classmethod
    def of(cls, model: Any) -> StoredConfig:
        """That of a Transformers model for which `why_not_lean` is None."""
        config, rotary = model.config, model.base_model.rotary_emb
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            inv_freq=rotary.inv_freq.tolist(),
            attention_scaling=float(rotary.attention_scaling),
        )


class StoredLlama:
    """Looks to `load_llama_weights` like the Transformers model of a checkpoint; tensors are read when due.

    Attributes:
        config: of the model.
        device: where tensors are read to, the CPU.
        base_model: this object: what is below the output projection.
        embed_tokens, norm: with the attribute `weight`.
        rotary_emb: with the attributes `inv_freq` and `attention_scaling`.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: StoredConfig, dtype: torch.dtype, *, stays: bool
    ) -> None:
        """Read `checkpoint`, of which `is_readable` is true, with weights of `dtype`.

        What `stays` on the CPU is copied; what goes to another device need not be.
        """
        self.config = config
        self.device = torch.device("cpu")
        self._checkpoint, self._dtype, self._stays = checkpoint, dtype, stays
        self.base_model = self
        self.embed_tokens = SimpleNamespace(weight=self._read(_EMBEDDING))
        self.norm = SimpleNamespace(weight=self._read(_NORM))
        self.rotary_emb = SimpleNamespace(
            inv_freq=torch.tensor(config.inv_freq, dtype=torch.float32, device=self.device),
            attention_scaling=config.attention_scaling,
        )

    @staticmethod
    def is_readable(checkpoint: Checkpoint, model: Any) -> bool:
        """Whether reading the tensors under their own names gives what Transformers made of them.

        Not so for names or shapes that it changes while it loads, or tensors that it makes up or drops.
        """
        of_model = model.state_dict()
        if model.config.tie_word_embeddings:
            del of_model[_HEAD]
        return checkpoint.names == set(of_model) and all(
            checkpoint.shape(name) == tuple(tensor.shape) and checkpoint.is_float(name)
            for name, tensor in of_model.items()
        )

    @property
    def layers(self) -> Iterator[Any]:
        """Each layer with its linear maps and norms, read when it is its turn."""
        for number in range(self.config.num_hidden_layers):
            yield self._modules(f"model.layers.{number}.")

    def get_output_embeddings(self) -> Any:
        """The output projection, with the attribute `weight`."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens
        return SimpleNamespace(weight=self._read(_HEAD))

    def _modules(self, prefix: str) -> SimpleNamespace:
        """The modules below a name, with their tensors; a `bias` that is not there is None."""
        found = SimpleNamespace()
        for name in self._checkpoint.names:
            if not name.startswith(prefix):
                continue
            *path, last = name.removeprefix(prefix).split(".")
            module = found
            for part in path:
                if not hasattr(module, part):
                    setattr(module, part, SimpleNamespace(bias=None))
                module = getattr(module, part)
            setattr(module, last, self._read(name))
        return found

    def _read(self, name: str) -> torch.Tensor:
        # What is read lies in the file, which may be replaced while the model serves.
        return self._checkpoint.read(name).to(self._dtype, copy=self._stays)
