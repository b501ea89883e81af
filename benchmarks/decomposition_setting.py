"""Models and batches of the decomposition benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decomposition_attention import SwitchedAttention
from benchmarks.decomposition_lengths import LONGEST
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.runner import Segment
from engine.tree import ancestor_mask


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-shaped model with random weights: what attention costs does not depend on them."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


# The demo family's target; and heads as of an 8B model, in two layers of a narrower one.
SHAPES = (
    Shape("demo target, 2 KV heads x 64", hidden=384, layers=8, heads=6, kv_heads=2, head_dim=64),
    Shape("8 KV heads x 128", hidden=1024, layers=2, heads=32, kv_heads=8, head_dim=128),
)


def make_runner(shape: Shape, num_slots: int, seed: int) -> tuple[LlamaRunner, SwitchedAttention]:
    """The model with random weights, and its attention."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 8 // 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2 * LONGEST,
        tie_word_embeddings=True,
    )
    weights = load_llama_weights(LlamaForCausalLM(config).eval())
    attention = SwitchedAttention(num_slots, dtype=weights.dtype)
    runner = LlamaRunner(weights, num_slots, attention)
    attention.fill(torch.Generator().manual_seed(seed))
    return runner, attention


def make_segments(rng: np.random.Generator, contexts: Sequence[int], num_nodes: int) -> list[Segment]:
    """A token tree for each context, on slots as serving leaves them.

    The first half of a context, its prompt, is a run of slots; the slots of what was generated alternate
    with those of the other requests.
    """
    prompts = [context // 2 for context in contexts]
    own = [context + num_nodes - prompt for context, prompt in zip(contexts, prompts, strict=True)]
    turns = np.concatenate([np.arange(count) for count in own])
    owner = np.repeat(np.arange(len(own)), own)
    place = np.empty(len(turns), dtype=np.int32)
    place[np.lexsort((owner, turns))] = np.arange(len(turns), dtype=np.int32) + sum(prompts)
    segments, first = [], 0
    for index, (context, prompt) in enumerate(zip(contexts, prompts, strict=True)):
        slots = np.concatenate([np.arange(first, first + prompt, dtype=np.int32), place[owner == index]])
        first += prompt
        parents = np.array([rng.integers(0, node) if node else -1 for node in range(num_nodes)], np.int32)
        visible = ancestor_mask(parents)
        segments.append(
            Segment(
                tokens=rng.integers(0, 4096, num_nodes).astype(np.int32),
                positions=(context + visible.sum(axis=1) - 1).astype(np.int32),
                slots=slots[context:],
                past=slots[:context],
                visible=None if num_nodes == 1 else visible,
            )
        )
    return segments
