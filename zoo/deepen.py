"""Models with layers added that change no output, for measurements of costlier ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint
from zoo.derived import write_derived

LAYER = "model.layers.{}."
#: What a layer adds to the residual stream comes out of these two; where they are zero it adds nothing.
LAST_OF_BRANCHES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def deepen(source: Path, out: Path, num_layers: int, *, seed: int = 0) -> int:
    """Write a Llama model that computes the same function through more layers.

    Layers are appended whose projections are random, except for the last of the attention and of the
    feed-forward branch, which are zero: what a layer adds to the residual stream is exactly zero, logits
    are equal bit for bit, and drafters are right as often as before. Weights read, operations, keys and
    values are those of a model with that many layers.

    Args:
        source: directory of the model, layers named as Transformers does.
        out: directory to write, with the tokenizer of the source.
        num_layers: of the written model.
        seed: of the random projections.

    Returns:
        Parameters of the written model.

    Raises:
        ValueError: for fewer layers than the source has, or a source with other names or biases.
        FileExistsError: if `out` is there.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    had = int(config["num_hidden_layers"])
    if num_layers < had:
        raise ValueError(f"{source} has {had} layers, {num_layers} would be fewer")
    checkpoint = Checkpoint(source)
    weights = {name: checkpoint.read(name) for name in sorted(checkpoint.names)}
    first = {name: weights[name] for name in weights if name.startswith(LAYER.format(0))}
    rest = {name.removeprefix(LAYER.format(0)) for name in first}
    if not rest.issuperset(LAST_OF_BRANCHES) or any(name.endswith(".bias") for name in rest):
        raise ValueError(f"{source}: layers need {' and '.join(LAST_OF_BRANCHES)}, and no biases")

    random = torch.Generator().manual_seed(seed)
    for layer in range(had, num_layers):
        for name, weight in first.items():
            own = name.replace(LAYER.format(0), LAYER.format(layer), 1)
            if name.endswith(LAST_OF_BRANCHES):
                weights[own] = torch.zeros_like(weight)
            elif weight.dim() == 1:
                weights[own] = torch.ones_like(weight)
            else:
                drawn = torch.randn(weight.shape, generator=random) * float(weight.float().std())
                weights[own] = drawn.to(weight.dtype)

    config["num_hidden_layers"] = num_layers
    return write_derived(source, out, config, weights)
