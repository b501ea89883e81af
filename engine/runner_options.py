"""How a model is to be loaded: what its results may depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from engine.attention_kinds import AttentionKind
from engine.kv_budget import NumSlots

if TYPE_CHECKING:  # it imports Transformers, which a start that has passed before does without
    from engine.quantization import Quantization

RunnerKind = Literal["auto", "hf", "lean"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Arguments of `engine.loading.load_runner`, where they are explained."""

    dtype: str
    num_slots: NumSlots
    runner: RunnerKind
    attention: AttentionKind | None
    rank: int
    world_size: int
    max_tokens: int | None
    quantization: Quantization | None
    trust_remote_code: bool
    feature_layers: tuple[int, ...]
    adapters: tuple[tuple[str, str], ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """What is computed in."""
        return DTYPES[self.dtype]
