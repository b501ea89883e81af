"""A small model grown to a large one's shape that computes the same: its costs, and drafters that are right.

python -m benchmarks.grown_checkpoint --model zoo/weights/target-8x384 --shape 8b /tmp/grown-8b

Function-preserving growth (Net2Net: Chen, Goodfellow and Shlens, ICLR 2016). The model's numbers are the
first ones of the larger model, and everything that is new adds zero:

- of the residual stream only the first `hidden` numbers are written: what reads others may be random;
- norms divide by the root of a mean over more numbers, most of them zero: gains and epsilon make up for it;
- heads grow by zeros in their queries, with each rotary pair where the larger head turns by the same
  angle; the output projection reads new heads by zeros, and the down projection new units;
- a new layer's output and down projections are zero.

A third of an 8B model's weights are zeros then, the others the small model's or random: all of them are
read and multiplied. `zoo.deepen` only adds layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig

from benchmarks.checkpoint_files import Parts, parser_of, projections, with_vocabulary, write_checkpoint
from benchmarks.forward_floor import SHAPES, Sizes
from engine.checkpoint import Checkpoint
from engine.devices import resolve_device

_NORMS = ("input_layernorm", "post_attention_layernorm")
#: Projections whose new outputs, and what they make of new inputs, are zero.
_SILENT = ("o_proj", "down_proj")

#: Places of something in a larger one: int64 [size of the smaller].
Places = torch.Tensor


@dataclass(frozen=True, slots=True)
class Growth:
    """Where the small model's numbers lie in the larger one.

    Attributes:
        small, large: the shapes.
    """

    small: Sizes
    large: Sizes

    def __post_init__(self) -> None:
        small, large = self.small, self.large
        too_small = [
            name
            for name in ("layers", "hidden", "kv_heads", "units")
            if getattr(large, name) < getattr(small, name)
        ]
        if small.heads // small.kv_heads > large.heads // large.kv_heads:
            too_small.append("heads of a key")
        if too_small:
            raise ValueError(f"a model cannot be grown to one with fewer {' and '.join(too_small)}")
        if large.head_dim % small.head_dim:
            raise ValueError(
                f"heads of {small.head_dim} do not turn by the angles of heads of {large.head_dim}, "
                "which would have to be a multiple"
            )

    def places(self, name: str) -> tuple[Places, Places]:
        """Of a projection's outputs and inputs."""
        hidden, units = torch.arange(self.small.hidden), torch.arange(self.small.units)
        queries, keys = self._heads(), torch.arange(self.small.kv_heads)
        match name.rpartition(".")[2]:
            case "q_proj":
                return self._within(queries, self._turned()), hidden
            case "k_proj":
                return self._within(keys, self._turned()), hidden
            case "v_proj":
                return self._within(keys, torch.arange(self.small.head_dim)), hidden
            case "o_proj":
                return hidden, self._within(queries, torch.arange(self.small.head_dim))
            case "down_proj":
                return hidden, units
            case _:
                return units, hidden

    @property
    def query_factor(self) -> float:
        """By which queries grow, since scores are divided by the root of a larger head size."""
        return math.sqrt(self.large.head_dim / self.small.head_dim)

    @property
    def gain_factor(self) -> float:
        """By which gains of norms shrink, since a mean over more numbers is smaller."""
        return math.sqrt(self.small.hidden / self.large.hidden)

    def query_rows(self) -> Places:
        """All outputs of the small model's query heads, what is new in them included."""
        return self._within(self._heads(), torch.arange(self.large.head_dim))

    def _heads(self) -> Places:
        """Of query heads, each in the group of its key's head."""
        group, larger = self.small.heads // self.small.kv_heads, self.large.heads // self.large.kv_heads
        number = torch.arange(self.small.heads)
        return number // group * larger + number % group

    def _turned(self) -> Places:
        """Of a head's numbers: pair i turns by theta ** (-2 i / size), as pair `ratio` i of a larger one."""
        half, ratio = self.small.head_dim // 2, self.large.head_dim // self.small.head_dim
        pairs = torch.arange(half) * ratio
        return torch.cat([pairs, pairs + self.large.head_dim // 2])

    def _within(self, heads: Places, numbers: Places) -> Places:
        return (heads[:, None] * self.large.head_dim + numbers[None]).flatten()


def sizes_of(config: LlamaConfig) -> Sizes:
    """The shape of a Llama model."""
    return Sizes(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        units=config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
    )


class Grower:
    """Makes the larger model's weights out of the small one's.

    Args:
        growth: where what is to lie.
        dtype: of the weights made.
        device: where random numbers are drawn.
    """

    def __init__(self, growth: Growth, dtype: torch.dtype, device: torch.device) -> None:
        self._growth, self._dtype, self._device = growth, dtype, device
        self._generator = torch.Generator(device=device).manual_seed(0)

    def random(self, outputs: int, inputs: int) -> torch.Tensor:
        """Weights that keep activations near one."""
        made = torch.empty(outputs, inputs, dtype=self._dtype, device=self._device)
        return made.normal_(0, inputs**-0.5, generator=self._generator).cpu()

    def gain(self, held: torch.Tensor) -> torch.Tensor:
        """Scales of a norm."""
        made = torch.ones(self._growth.large.hidden, dtype=self._dtype)
        made[: len(held)] = (held.float() * self._growth.gain_factor).to(self._dtype)
        return made

    def placed(self, into: torch.Tensor, held: torch.Tensor, outputs: Places, inputs: Places) -> torch.Tensor:
        """The larger matrix, with the smaller one in it."""
        into[outputs[:, None], inputs[None]] = held.to(self._dtype)
        return into

    def projection(self, name: str, held: torch.Tensor | None, parts: int = 1) -> torch.Tensor:
        """Of a layer.

        Args:
            name: within the layer.
            held: the small model's; None in a layer that it does not have.
            parts: how many times the width of the residual stream it reads.
        """
        growth = self._growth
        outputs, inputs = projections(growth.large)[name]
        if name.endswith(_SILENT):
            made = torch.zeros(outputs, inputs, dtype=self._dtype)
            return made if held is None else self.placed(made, held, *growth.places(name))
        made = self.random(outputs, parts * inputs)
        if held is None:
            return made
        to, of = growth.places(name)
        if name.endswith("q_proj"):
            held = held.float() * growth.query_factor
            # What is new in a head must not be scored, whatever the keys have there.
            made[growth.query_rows()] = 0
        return self.placed(made, held, to, several(of, growth.large.hidden, parts))


def several(places: Places, width: int, parts: int) -> Places:
    """The places in each of several vectors of a width, one after the other."""
    return (torch.arange(parts)[:, None] * width + places[None]).flatten()


def tensors(source: Path, growth: Growth, dtype: torch.dtype, device: torch.device) -> Parts:
    """The grown model's weights by their names, one file's at a time."""
    checkpoint, small, large = Checkpoint(source), growth.small, growth.large
    grower, read = Grower(growth, dtype, device), checkpoint.read
    tokens = read("model.embed_tokens.weight")
    rows, hidden = torch.arange(small.vocab), torch.arange(small.hidden)
    embedding = grower.placed(torch.zeros(large.vocab, large.hidden, dtype=dtype), tokens, rows, hidden)
    outside = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": grower.gain(read("model.norm.weight")),
    }
    if not large.tied:
        head = tokens if small.tied else read("lm_head.weight")
        outside["lm_head.weight"] = grower.placed(
            grower.random(large.vocab, large.hidden), head, rows, hidden
        )
    yield outside
    for number in range(large.layers):
        of = f"model.layers.{number}."
        is_old = number < small.layers
        layer = {
            f"{of}{name}.weight": grower.projection(name, read(f"{of}{name}.weight") if is_old else None)
            for name in projections(large)
        }
        for name in _NORMS:
            full = f"{of}{name}.weight"
            layer[full] = grower.gain(read(full)) if is_old else torch.ones(large.hidden, dtype=dtype)
        yield layer


def write(
    directory: Path, source: Path, shape: Sizes, *, dtype: str = "bfloat16", device: str = "auto"
) -> int:
    """Write a model of a shape that computes what a small one does, up to the rounding of `dtype`.

    Args:
        directory: made if it is not there; files of the same names are overwritten.
        source: directory of a Llama model without biases, with a tokenizer.
        shape: of it, but for the vocabulary, which is the source's.
        dtype: of the weights.
        device: where random numbers are drawn, which for billions of them is to be a GPU.

    Returns:
        bytes of weights.

    Raises:
        ValueError: for a source that is no such model, or not smaller.
        DeviceUnavailable: if there is no such device.
    """
    config = AutoConfig.from_pretrained(source)
    if not isinstance(config, LlamaConfig) or config.attention_bias or config.mlp_bias:
        raise ValueError(f"{source} is no Llama model without biases")
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{source} scales its rotary embedding ({rope['rope_type']})")
    small = sizes_of(config)
    growth = Growth(small, with_vocabulary(shape, source))
    if small.vocab != growth.large.vocab or (growth.large.tied and not small.tied):
        raise ValueError(
            f"{source} has another vocabulary than its tokenizer, or an output projection of its own"
        )
    parts = tensors(source, growth, getattr(torch, dtype), resolve_device(device))
    return write_checkpoint(
        directory,
        growth.large,
        parts,
        source,
        dtype=dtype,
        max_tokens=config.max_position_embeddings,
        rope_parameters=rope,
        rms_norm_eps=config.rms_norm_eps * growth.gain_factor**2,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Write what the command line asks for."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of the small model")
    options = parser.parse_args(argv)
    num_bytes = write(
        options.directory, options.model, SHAPES[options.shape], dtype=options.dtype, device=options.device
    )
    print(
        f"{options.directory}: {options.model.name} in the shape of {options.shape}, {num_bytes / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
