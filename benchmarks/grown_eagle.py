"""The EAGLE-3 drafter of a model that was grown, grown to the same width: it drafts what it drafted before.

    python -m benchmarks.grown_eagle --eagle zoo/weights/eagle-1x384 --target zoo/weights/target-8x384 \\
        --shape 8b /tmp/grown-eagle

It reads the grown target's hidden states (`benchmarks.grown_checkpoint`), of the layers whose inputs it was
trained on, and uses that target's embedding and output projection.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from benchmarks.checkpoint_files import parser_of, projections
from benchmarks.forward_floor import SHAPES, Sizes
from benchmarks.grown_checkpoint import Grower, Growth, several
from engine.checkpoint import Checkpoint
from engine.devices import resolve_device
from engine.eagle_config import feature_layers, read_eagle_config

_LAYER = "midlayer."
_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
#: Of these the layer's embedding and hidden state are both read.
_OF_BOTH = ("q_proj", "k_proj", "v_proj")


def write(
    directory: Path,
    source: Path,
    target: Path,
    shape: Sizes,
    *,
    dtype: str = "bfloat16",
    device: str = "auto",
) -> int:
    """Write an EAGLE-3 drafter for the target in a shape.

    Args:
        directory: made if it is not there; files of the same names are overwritten.
        source: of the drafter, in the layout of the EAGLE repository, with the target's embedding and output
            projection.
        target: of the model it was trained for, not grown.
        shape: that the target is grown to.
        dtype: of the weights.
        device: where random numbers are drawn.

    Returns:
        bytes of weights.

    Raises:
        UnsuitableEagle: if it is no such drafter.
        ValueError: if it has weights of its own beside the layer, or is not smaller.
        DeviceUnavailable: if there is no such device.
    """
    described, of_target = read_eagle_config(source), AutoConfig.from_pretrained(target)
    layer, checkpoint = described.layer, Checkpoint(source)
    small = Sizes(
        layers=1,
        hidden=described.hidden_size,
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        units=layer["intermediate_size"],
        vocab=described.vocab_size,
    )
    large = replace(shape, layers=1, vocab=small.vocab)
    growth, kind = Growth(small, large), getattr(torch, dtype)
    grower, width = Grower(growth, kind, resolve_device(device)), torch.arange(small.hidden)
    fc = torch.zeros(large.hidden, 3 * large.hidden, dtype=kind)
    made = {
        "fc.weight": grower.placed(fc, checkpoint.read("fc.weight"), width, several(width, large.hidden, 3)),
        "norm.weight": grower.gain(checkpoint.read("norm.weight")),
    }
    for name in _NORMS:
        made[f"{_LAYER}{name}.weight"] = grower.gain(checkpoint.read(f"{_LAYER}{name}.weight"))
    for name in projections(large):
        full = f"{_LAYER}{name}.weight"
        made[full] = grower.projection(name, checkpoint.read(full), 2 if name.endswith(_OF_BOTH) else 1)
    if others := sorted(checkpoint.names - made.keys()):
        raise ValueError(f"{source} has weights that are not grown: {', '.join(others)}")
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | {
        "hidden_size": large.hidden,
        "intermediate_size": large.units,
        "num_attention_heads": large.heads,
        "num_key_value_heads": large.kv_heads,
        "head_dim": large.head_dim,
        "rms_norm_eps": layer["rms_norm_eps"] * growth.gain_factor**2,
        # Of the target that was grown: the larger one has more layers.
        "eagle_aux_hidden_state_layer_ids": list(
            described.feature_layers or feature_layers(of_target.num_hidden_layers)
        ),
    }
    for name in ("target", "target_sha256"):
        config.pop(name, None)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(made, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in made.values())


def main(argv: Sequence[str] | None = None) -> None:
    """Write what the command line asks for."""
    parser = parser_of(__doc__)
    parser.add_argument("--eagle", type=Path, required=True, help="directory of the drafter")
    parser.add_argument("--target", type=Path, required=True, help="directory of its target, not grown")
    options = parser.parse_args(argv)
    num_bytes = write(
        options.directory,
        options.eagle,
        options.target,
        SHAPES[options.shape],
        dtype=options.dtype,
        device=options.device,
    )
    print(f"{options.directory}: {options.eagle} beside {options.shape}, {num_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
