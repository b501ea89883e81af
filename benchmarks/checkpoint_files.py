"""Checkpoints in Transformers' layout, written layer by layer, so that no large model is held whole."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.forward_floor import SHAPES, Sizes, transformers_config
from deployments.tokenizer_loading import load_tokenizer

#: One file's weights by their names: first what is no layer's, then each layer's.
Parts = Iterator[dict[str, torch.Tensor]]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_INDEX = "model.safetensors.index.json"


def parser_of(module_docstring: str | None) -> argparse.ArgumentParser:
    """Of a command that writes a checkpoint in a shape: what all of them ask, told by the first line."""
    parser = argparse.ArgumentParser(description=(module_docstring or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where it is written")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", default="auto", help="where random numbers are drawn")
    return parser


def projections(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's projections, by name within the layer."""
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return {
        "self_attn.q_proj": (queries, sizes.hidden),
        "self_attn.k_proj": (keys, sizes.hidden),
        "self_attn.v_proj": (keys, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, queries),
        "mlp.gate_proj": (sizes.units, sizes.hidden),
        "mlp.up_proj": (sizes.units, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.units),
    }


def with_vocabulary(sizes: Sizes, tokenizer: Path) -> Sizes:
    """The shape with as many tokens as a tokenizer has."""
    return replace(sizes, vocab=len(load_tokenizer(tokenizer)))


def write_checkpoint(
    directory: Path,
    sizes: Sizes,
    parts: Parts,
    tokenizer: Path,
    *,
    dtype: str,
    max_tokens: int,
    **fields: Any,
) -> int:
    """Write a model with the tokenizer of another, whose files are copied.

    Args:
        directory: made if it is not there; files of the same names are overwritten.
        sizes: of the model.
        parts: its weights, 1 + `sizes.layers` of them.
        tokenizer: directory of a model with one.
        dtype: of the weights.
        max_tokens: longest sequence.
        fields: further ones of its configuration.

    Returns:
        bytes of weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    about = {"architectures": ["LlamaForCausalLM"], "dtype": dtype} | _ends_of(tokenizer) | fields
    transformers_config(sizes, max_tokens, **about).save_pretrained(directory)
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, directory / name)
    found: dict[str, str] = {}
    num_bytes, files = 0, 1 + sizes.layers
    for number, held in enumerate(parts, 1):
        file = f"model-{number:05}-of-{files:05}.safetensors"
        save_file(held, directory / file, metadata={"format": "pt"})
        found |= dict.fromkeys(held, file)
        num_bytes += sum(tensor.nbytes for tensor in held.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": found}
    (directory / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return num_bytes


def _ends_of(tokenizer: Path) -> dict[str, int]:
    """Ids of the tokens that begin, end and pad a text, as the model beside the tokenizer has them."""
    config = json.loads((tokenizer / "config.json").read_text())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if isinstance(config.get(name), int)}
