"""A checkpoint of a model's shape with random weights, to time a server of that size without downloading one.

python -m benchmarks.random_checkpoint --shape 8b --tokenizer zoo/weights/target-8x384 /tmp/random-8b

What it generates means nothing, and no drafter is right about it: times only.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from benchmarks.forward_floor import SHAPES, Sizes, transformers_config
from engine.devices import resolve_device

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_INDEX = "model.safetensors.index.json"


def tensors(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """The weights by their names, one file's at a time: what is not a layer's, then each layer's.

    They keep activations near one.
    """
    generator = torch.Generator(device=device).manual_seed(0)

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        made = torch.empty(outputs, inputs, dtype=dtype, device=device)
        return made.normal_(0, inputs**-0.5, generator=generator).cpu()

    ones = torch.ones(sizes.hidden, dtype=dtype)
    outside = {"model.embed_tokens.weight": weight(sizes.vocab, sizes.hidden), "model.norm.weight": ones}
    if not sizes.tied:
        outside["lm_head.weight"] = weight(sizes.vocab, sizes.hidden)
    yield outside
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {
        "self_attn.q_proj": (queries, sizes.hidden),
        "self_attn.k_proj": (keys, sizes.hidden),
        "self_attn.v_proj": (keys, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, queries),
        "mlp.gate_proj": (sizes.units, sizes.hidden),
        "mlp.up_proj": (sizes.units, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.units),
    }
    for number in range(sizes.layers):
        layer = {name: weight(*shape) for name, shape in shapes.items()}
        layer |= {"input_layernorm": ones.clone(), "post_attention_layernorm": ones.clone()}
        yield {f"model.layers.{number}.{name}.weight": tensor for name, tensor in layer.items()}


def write(
    directory: Path,
    shape: str,
    tokenizer: Path,
    *,
    dtype: str = "bfloat16",
    max_tokens: int = 4096,
    device: str = "auto",
) -> int:
    """Write a checkpoint for Transformers, with the vocabulary of a tokenizer, whose files are copied.

    Args:
        directory: made if it is not there; files of the same names are overwritten.
        shape: of `benchmarks.forward_floor.SHAPES`, but for the vocabulary.
        tokenizer: directory of a model with one.
        dtype: of the weights.
        max_tokens: longest sequence.
        device: where the numbers are drawn, which for billions of them is to be a GPU.

    Returns:
        bytes of weights.

    Raises:
        KeyError: if there is no such shape.
        DeviceUnavailable: if there is no such device.
    """
    sizes, kind = SHAPES[shape], getattr(torch, dtype)
    sizes = replace(sizes, vocab=len(AutoTokenizer.from_pretrained(tokenizer)))
    directory.mkdir(parents=True, exist_ok=True)
    about = {"architectures": ["LlamaForCausalLM"], "dtype": dtype} | _ends_of(tokenizer)
    transformers_config(sizes, max_tokens, **about).save_pretrained(directory)
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, directory / name)
    found: dict[str, str] = {}
    num_bytes = 0
    files = 1 + sizes.layers
    for number, held in enumerate(tensors(sizes, kind, resolve_device(device)), 1):
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


def main(argv: Sequence[str] | None = None) -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="where it is written")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="directory of a model whose tokenizer it gets"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=4096, help="longest sequence")
    parser.add_argument("--device", default="auto", help="where the numbers are drawn")
    options = parser.parse_args(argv)
    num_bytes = write(
        options.directory,
        options.shape,
        options.tokenizer,
        dtype=options.dtype,
        max_tokens=options.max_tokens,
        device=options.device,
    )
    print(f"{options.directory}: {num_bytes / 1e9:.2f} GB of weights in the shape of {options.shape}")


if __name__ == "__main__":
    main()
