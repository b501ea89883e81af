"""Shapes of the family's models, building them, and writing them as Hugging Face directories."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zoo.registry import LARGER_DRAFTER, LARGER_TARGET, TARGET

#: Longest sequence the models are made for, in tokens.
WINDOW = 1024


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama model with tied embeddings."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int


SHAPES: dict[str, Shape] = {
    TARGET: Shape(8, 384, 6, 2, 1024),
    "drafter-general-2x192": Shape(2, 192, 3, 1, 512),
    "drafter-code-2x128": Shape(2, 128, 2, 1, 384),
    "drafter-chat-2x128": Shape(2, 128, 2, 1, 384),
    "drafter-summary-1x128": Shape(1, 128, 2, 1, 384),
    "drafter-vocab1024-2x128": Shape(2, 128, 2, 1, 192),
    LARGER_TARGET: Shape(32, 1024, 8, 2, 2816),
    LARGER_DRAFTER: Shape(2, 384, 6, 2, 1024),
}


def build(name: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """A freshly initialised model of the named shape, in float32."""
    shape = SHAPES[name]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def quieten_residuals(model: LlamaForCausalLM) -> None:
    """Scale what each layer adds to the residual stream by 1 / sqrt(2 x layers), as GPT-2's initialisation.

    So that the stream of a deep model does not begin with the sum of all its layers' noise.
    """
    layers = model.model.layers
    for layer in layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.mul_((2 * len(layers)) ** -0.5)


@torch.no_grad()
def project_embeddings(
    drafter: LlamaForCausalLM, target: LlamaForCausalLM, rows: list[int] | None = None
) -> None:
    """Start the drafter's embeddings from the target's, projected on their first principal directions.

    Where the vocabularies differ, ``rows`` names the target's token for each of the drafter's; where that is
    -1 they stay as they are.

    They are most of a drafter's parameters, and rare tokens among them see few gradients in a short training.
    """
    taught = target.model.embed_tokens.weight.float()
    width = drafter.model.embed_tokens.weight.shape[1]
    _, directions = torch.linalg.eigh(taught.T @ taught)
    projected = taught @ directions[:, -width:]
    if rows is None:
        drafter.model.embed_tokens.weight.copy_(projected)
        return
    known = torch.tensor([token for token, row in enumerate(rows) if row >= 0])
    drafter.model.embed_tokens.weight[known] = projected[[row for row in rows if row >= 0]]


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write weights in float16 with configuration, generation settings and tokenizer.

    A run that is killed meanwhile leaves no ``directory``: one that is there is taken for a finished model.
    """
    half = LlamaForCausalLM(model.config).to(torch.float16)
    half.load_state_dict({k: v.to(torch.float16) for k, v in model.state_dict().items()})
    half.tie_weights()
    half.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    unfinished = directory.with_name(f"{directory.name}.new")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    half.save_pretrained(str(unfinished))
    tokenizer.save_pretrained(str(unfinished))
    if directory.exists():
        shutil.rmtree(directory)
    unfinished.rename(directory)


def load(directory: Path) -> LlamaForCausalLM:
    """A model of the family for use, in float32, without dropout."""
    model = LlamaForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model.eval()
