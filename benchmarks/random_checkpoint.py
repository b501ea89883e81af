"""A checkpoint of a model's shape with random weights, to time a server of that size without downloading one.

python -m benchmarks.random_checkpoint --shape 8b --tokenizer zoo/weights/target-8x384 /tmp/random-8b

What it generates means nothing, and no drafter is right about it: times only. `benchmarks.grown_checkpoint`
writes one of that size which generates what a small model does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.checkpoint_files import Parts, parser_of, projections, with_vocabulary, write_checkpoint
from benchmarks.forward_floor import SHAPES, Sizes
from engine.devices import resolve_device


def tensors(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Parts:
    """The weights by their names, one file's at a time. They keep activations near one."""
    generator = torch.Generator(device=device).manual_seed(0)

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        made = torch.empty(outputs, inputs, dtype=dtype, device=device)
        return made.normal_(0, inputs**-0.5, generator=generator).cpu()

    ones = torch.ones(sizes.hidden, dtype=dtype)
    outside = {"model.embed_tokens.weight": weight(sizes.vocab, sizes.hidden), "model.norm.weight": ones}
    if not sizes.tied:
        outside["lm_head.weight"] = weight(sizes.vocab, sizes.hidden)
    yield outside
    for number in range(sizes.layers):
        layer = {name: weight(*shape) for name, shape in projections(sizes).items()}
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
    sizes = with_vocabulary(SHAPES[shape], tokenizer)
    parts = tensors(sizes, getattr(torch, dtype), resolve_device(device))
    return write_checkpoint(directory, sizes, parts, tokenizer, dtype=dtype, max_tokens=max_tokens)


def main(argv: Sequence[str] | None = None) -> None:
    """Write what the command line asks for."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="directory of a model whose tokenizer it gets"
    )
    parser.add_argument("--max-tokens", type=int, default=4096, help="longest sequence")
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
