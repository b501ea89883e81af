"""Weights of an EAGLE-3 drafter, read from its directory and laid out for `engine.eagle`."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.eagle_config import EagleDescription, UnsuitableEagle
from engine.eagle_shape import eagle_shape
from engine.linear import Linear
from engine.rotary import paired, rotation_table

_LAYER = "layers.0."


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """All that `engine.eagle.EagleLayer` needs.

    Attributes:
        combine: from the target's features, [rows, 3 * target hidden], to [rows, hidden].
        feature_norm: [3 * target hidden], scales of a norm before it; None without one.
        qkv: of normalised embeddings and normalised hidden states, [rows, 2 * hidden], their scales in it.
        residual_scale: [hidden], what a normalised hidden state is multiplied by where that is what is added
            to; None where that is the hidden state itself.
        out, gate_up, down: as of `LlamaLayer`.
        head: output projection to the tokens drafted; None for the target's.
        output_scale: [hidden], scales of the norm before it.
        norm_output: whether the next layer reads the normalised output.
        embedding: [vocab, hidden]; None for the target's.
        token_of: int64 [drafted tokens], the target's token of each; None where they are the same.
        rotation: as of `LlamaWeights`.
        eps, heads, kv_heads, head_dim, hidden_size: of the layer.
    """

    combine: Linear
    feature_norm: torch.Tensor | None
    qkv: Linear
    residual_scale: torch.Tensor | None
    out: Linear
    gate_up: Linear
    down: Linear
    head: Linear | None
    output_scale: torch.Tensor
    norm_output: bool
    embedding: torch.Tensor | None
    token_of: torch.Tensor | None
    rotation: torch.Tensor
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int


def load_eagle_weights(
    directory: Path, config: EagleDescription, *, max_tokens: int, dtype: torch.dtype, device: torch.device
) -> EagleWeights:
    """Read `*.safetensors`, or `pytorch_model.bin` where there are none (tensors only, no code).

    Args:
        directory: of the drafter.
        config: what its `config.json` says.
        max_tokens: longest sequence.
        dtype: what is computed in.
        device: where it runs.

    Raises:
        UnsuitableEagle: if weights are missing, of another shape, or not understood.
    """
    take = _Taker(directory, dtype, device)
    try:
        shape = eagle_shape(config.layer, max_tokens)
    except Exception as error:  # Transformers raises more than one kind, some of its own
        raise take.refused(f"has a configuration of no Llama layer: {error!r}") from error
    width, units, heads, kv_heads, dim = shape[:5]
    q = take(f"{_LAYER}self_attn.q_proj.weight", heads * dim, 2 * width)
    k, v = (take(f"{_LAYER}self_attn.{name}_proj.weight", kv_heads * dim, 2 * width) for name in "kv")
    gate, up = (take(f"{_LAYER}mlp.{name}_proj.weight", units, width) for name in ("gate", "up"))
    entered, hidden = (take(f"{_LAYER}{name}.weight", width) for name in ("input_layernorm", "hidden_norm"))
    features = 3 * config.target_hidden_size
    weights = EagleWeights(
        combine=Linear(take("fc.weight", width, features)),
        feature_norm=take("input_norm.weight", features) if config.norm_before_fc else None,
        qkv=Linear(torch.cat([paired(q, dim), paired(k, dim), v]), scale=torch.cat([entered, hidden])),
        residual_scale=hidden if config.norm_before_residual else None,
        out=Linear(take(f"{_LAYER}self_attn.o_proj.weight", width, heads * dim)),
        gate_up=Linear(torch.cat([gate, up]), scale=take(f"{_LAYER}post_attention_layernorm.weight", width)),
        down=Linear(take(f"{_LAYER}mlp.down_proj.weight", width, units)),
        head=_head(take, config, width),
        output_scale=take("norm.weight", width),
        norm_output=config.norm_output,
        embedding=_embedding(take, config, width),
        token_of=_token_of(take, config),
        rotation=rotation_table(shape.rotary, max_tokens, torch.device("cpu")).to(device),
        eps=shape.eps,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        hidden_size=width,
    )
    if take.found:
        raise take.refused(f"has weights that are not understood: {', '.join(sorted(take.found))}")
    return weights


class _Taker:
    """Takes weights out of what was read, checked, as they are computed with.

    Attributes:
        found: what nobody took yet.
        device: where they go.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._directory, self._dtype, self.device = directory, dtype, device
        self.found = _read(directory)

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """The weights of that name and shape."""
        weight = self.found.pop(name, None)
        if weight is None:
            raise self.refused(f"has no weights `{name}`")
        if tuple(weight.shape) != shape:
            raise self.refused(
                f"has weights `{name}` of {list(weight.shape)}, and its configuration says {list(shape)}"
            )
        return weight.to(device=self.device, dtype=self._dtype)

    def refused(self, why: str) -> UnsuitableEagle:
        """The error that says so."""
        return UnsuitableEagle(f"the EAGLE-3 drafter in {self._directory} {why}")


def _head(take: _Taker, config: EagleDescription, width: int) -> Linear | None:
    """Its own output projection, if it has one."""
    if "lm_head.weight" in take.found:
        return Linear(take("lm_head.weight", config.draft_vocab_size, width))
    if config.draft_vocab_size != config.vocab_size or width != config.target_hidden_size:
        raise take.refused("has no lm_head, and cannot use the target's, which is of another size")
    return None


def _embedding(take: _Taker, config: EagleDescription, width: int) -> torch.Tensor | None:
    """Its own embeddings, if it has some."""
    if "embed_tokens.weight" in take.found:
        return take("embed_tokens.weight", config.vocab_size, width)
    if width != config.target_hidden_size:
        raise take.refused("has no embeddings, and cannot use the target's, which are of another size")
    return None


def _token_of(take: _Taker, config: EagleDescription) -> torch.Tensor | None:
    """int64 [drafted tokens], from `d2t`, which says how far each is from the target's token."""
    offsets = take.found.pop("d2t", None)
    take.found.pop("t2d", None)
    if config.draft_vocab_size == config.vocab_size and (offsets is None or not offsets.any()):
        return None
    if offsets is None or offsets.shape != (config.draft_vocab_size,):
        raise take.refused(f"lacks `d2t`, which names the target's tokens of its {config.draft_vocab_size}")
    token_of = torch.arange(config.draft_vocab_size) + offsets.long().cpu()
    if int(token_of.min()) < 0 or int(token_of.max()) >= config.vocab_size:
        raise take.refused("names tokens in `d2t` that the target does not have")
    return token_of.to(take.device)


def _read(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors by name, with the names of the one layer as vLLM has them."""
    found: dict[str, torch.Tensor] = {}
    try:
        for path in sorted(directory.glob("*.safetensors")):
            found |= load_file(path)
        pickled = directory / "pytorch_model.bin"
        if not found and pickled.is_file():
            found = dict(torch.load(pickled, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:  # what torch says of it advises to trust the file
        raise UnsuitableEagle(f"{pickled} holds other things than tensors") from error
    except (EOFError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise UnsuitableEagle(f"cannot read the weights in {directory}: {error}") from error
    if not found:
        raise UnsuitableEagle(f"no weights in {directory}: neither *.safetensors nor pytorch_model.bin")
    return {name.removeprefix("model.").replace("midlayer.", _LAYER): x for name, x in found.items()}
