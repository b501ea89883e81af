"""Weights of Llama-shaped models, fused and folded for `LlamaRunner`, whole or one rank's share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from engine.adapted_linear import AdapterRows
from engine.adapter_files import Adapter, LowRank
from engine.context_length import longest_sequence
from engine.experts import AnyLinear, FeedForward
from engine.linear import Linear
from engine.llama_adapters import LlamaAdapters, Part
from engine.mixture import Mixture
from engine.mixture_weights import MIXTURES, expert_share, is_mixture, mixture_of, units_of
from engine.quantized_linear import make_linear
from engine.rotary import paired, rotation_table
from engine.runner_options import RunnerOptions
from engine.stored_llama import StoredLlama
from engine.weight_parts import Weight, columns, joined, rows, weight_of, widened

if TYPE_CHECKING:  # importing it takes longer than all else of a start that does without
    from transformers import PreTrainedModel

_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"}) | MIXTURES
# Rotary variants whose angles depend on the position alone; the others change with the sequence length.
_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True, slots=True, eq=False)
class LlamaLayer:
    """One layer: linear maps with the scales of the norm before them, but for quantized ones (`gain`).

    `qkv` yields query heads, key heads, value heads. `head_norms` [query and key heads, head_dim] are the
    scales of Qwen3's norms of queries and keys, else None.
    """

    qkv: AnyLinear
    out: AnyLinear
    mlp: FeedForward | Mixture
    head_norms: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All a `LlamaRunner` needs; `heads` and `kv_heads` are this rank's.

    Attributes:
        embedding: [vocab, hidden].
        head: output projection to the vocabulary, with the scales of the final norm.
        head_scale: [hidden], the scales in `head`: normalised rows times it are the last hidden state.
        rotation: complex64 [max_tokens, 1, head_dim / 2], rotary factor of each position and pair.
        norm_floor: `sqrt(hidden * eps)` as a scalar tensor; None where the runner normalises with
            `rms_norm` or Triton: on GPUs, and where `dtype` is too coarse for the shortcut.
        group: ranks the model is spread over; None for a single one.
        adapters: which adapter each row has; None where there are none.
        expert_share: of a layer's experts, how many each row is sent to; 0 for a model without any.
    """

    layers: list[LlamaLayer]
    embedding: torch.Tensor
    head: Linear
    head_scale: torch.Tensor
    rotation: torch.Tensor
    norm_floor: torch.Tensor | None
    eps: float
    scale: float
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_tokens: int
    dtype: torch.dtype
    device: torch.device
    group: ProcessGroup | None = None
    adapters: AdapterRows | None = None
    expert_share: float = 0.0


def why_not_lean(config: Any, *, max_tokens: int | None = None) -> str | None:
    """What about this Transformers configuration `LlamaRunner` does not handle; None if nothing."""
    if config.model_type not in _FAMILY:
        return f"{config.model_type} is not a Llama-shaped model"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _FIXED_ROTATIONS or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rotary embeddings of type {rope_type}"
    window = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    longest = longest_sequence(config, max_tokens) or 0
    if window is not None and windowed and window < longest:
        return f"sliding window of {window} tokens (set max_model_len to that at most)"
    return None


def load_llama_weights(
    model: PreTrainedModel | StoredLlama,
    *,
    max_tokens: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    adapters: Sequence[Adapter] = (),
) -> LlamaWeights:
    """Convert the weights of a model, layer by layer; the model is left as and where it is.

    Args:
        model: a Transformers model for which `why_not_lean` is None, or its checkpoint.
        max_tokens: longest sequence, at most `most_positions` of the configuration; by default its
            `max_position_embeddings`.
        rank: which share of heads and feed-forward units to take, of `world_size`.
        world_size: number of ranks; 1 takes everything.
        group: process group of the ranks, needed when there are several.
        device: where this rank's share goes, the rest of the model never does; the model's by default.
        adapters: what rows may have added to linear maps.

    Raises:
        ValueError: if heads, key-value heads or feed-forward units cannot be divided by `world_size`.
        UnsupportedModel: if an adapter is another model's.
    """
    config = model.config
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        **{f"feed-forward units (`{name}`)": size for name, size in units_of(config).items()},
    }
    for name, size in sizes.items():
        if size % world_size:
            raise ValueError(f"{size} {name} cannot be divided over {world_size} ranks")
    heads = config.num_attention_heads // world_size
    kv_heads = config.num_key_value_heads // world_size
    device = device or model.device
    base = model.base_model
    dtype: torch.dtype = base.embed_tokens.weight.dtype
    layouts = LlamaAdapters(adapters, dtype=dtype, device=device) if adapters else None
    share = _Share(
        head_dim=head_dim,
        heads=heads,
        kv_heads=kv_heads,
        rank=rank,
        world_size=world_size,
        device=device,
        dtype=dtype,
        adapters=layouts,
    )
    # Rarely quantized, and its rows are wanted without the final norm's scales, too.
    head = widened(weight_of(model.get_output_embeddings()), dtype)
    eps = float(config.rms_norm_eps)
    is_short = dtype == torch.float32 and device.type == "cpu"  # a GPU has kernels for norms
    gain = math.sqrt(config.hidden_size) if is_short else 1.0
    longest = max_tokens or int(config.max_position_embeddings)
    with torch.no_grad():
        # First, for on the way it takes the most memory.
        projection = Linear(head.to(device), scale=_scale(base.norm, gain))
        layers = [share.layer(index, layer, gain) for index, layer in enumerate(base.layers)]
        if layouts is not None:
            layouts.check_all_used()
        return LlamaWeights(
            layers=layers,
            embedding=base.embed_tokens.weight.detach().to(device),
            head=projection,
            head_scale=base.norm.weight.to(device).float() * gain,
            rotation=rotation_table(base.rotary_emb, longest, model.device).to(device),
            norm_floor=torch.tensor(math.sqrt(config.hidden_size * eps), device=device) if is_short else None,
            eps=eps,
            scale=head_dim**-0.5,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=int(config.vocab_size),
            max_tokens=longest,
            dtype=dtype,
            device=device,
            group=group if world_size > 1 else None,
            adapters=None if layouts is None else layouts.rows,
            expert_share=expert_share(config),
        )


def load_share(
    model: PreTrainedModel | StoredLlama,
    device: torch.device,
    options: RunnerOptions,
    adapters: Sequence[Adapter] = (),
) -> LlamaWeights:
    """The weights of this process' rank, by what the runner is asked to be."""
    return load_llama_weights(
        model,
        max_tokens=options.max_tokens,
        rank=options.rank,
        world_size=options.world_size,
        group=torch.distributed.group.WORLD if options.world_size > 1 else None,
        device=device,
        adapters=adapters,
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """Cuts one rank's part out of a layer; `heads` and `kv_heads` are per rank."""

    head_dim: int
    heads: int
    kv_heads: int
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    adapters: LlamaAdapters | None

    def layer(self, index: int, layer: Any, gain: float) -> LlamaLayer:
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        qkv = joined(
            [self._queries(weight_of(q)), self._keys(weight_of(k)), self._values(weight_of(v))], self.dtype
        )
        bias = None
        if q.bias is not None:
            bias = torch.cat(
                [
                    paired(self._columns(q.bias, self.heads), self.head_dim),
                    paired(self._columns(k.bias, self.kv_heads), self.head_dim),
                    self._columns(v.bias, self.kv_heads),
                ]
            )
        norms = None
        if getattr(attention, "q_norm", None) is not None:
            query_scale = paired(attention.q_norm.weight.to(self.device), self.head_dim).expand(
                self.heads, -1
            )
            key_scale = paired(attention.k_norm.weight.to(self.device), self.head_dim).expand(
                self.kv_heads, -1
            )
            norms = torch.cat([query_scale, key_scale]).contiguous()
        name = f"model.layers.{index}"
        return LlamaLayer(
            qkv=self._linear(
                qkv,
                bias,
                _scale(layer.input_layernorm, gain),
                [
                    Part.of(f"{name}.self_attn.q_proj", weight_of(q), _outputs(self._queries)),
                    Part.of(f"{name}.self_attn.k_proj", weight_of(k), _outputs(self._keys)),
                    Part.of(f"{name}.self_attn.v_proj", weight_of(v), _outputs(self._values)),
                ],
            ),
            out=self._row_split(f"{name}.self_attn.o_proj", attention.o_proj),
            mlp=self._mlp(f"{name}.mlp", mlp, _scale(layer.post_attention_layernorm, gain)),
            head_norms=norms,
        )

    def _mlp(self, name: str, mlp: Any, scale: torch.Tensor) -> FeedForward | Mixture:
        if is_mixture(mlp):
            shared = None
            if getattr(mlp, "shared_expert", None) is not None:  # rows are given to it with their gain
                shared = self._network(f"{name}.shared_expert", mlp.shared_expert, None)
            return mixture_of(mlp, scale, self._units_of, self._inputs_of, self.device, shared)
        return self._network(name, mlp, scale)

    def _network(self, name: str, mlp: Any, scale: torch.Tensor | None) -> FeedForward:
        projections = {"gate_proj": mlp.gate_proj, "up_proj": mlp.up_proj}
        weights = {one: weight_of(linear) for one, linear in projections.items()}
        bias = None
        if mlp.gate_proj.bias is not None:
            bias = torch.cat([self._units(mlp.gate_proj.bias), self._units(mlp.up_proj.bias)])
        return FeedForward(
            gate_up=self._linear(
                joined([self._units_of(weight) for weight in weights.values()], self.dtype),
                bias,
                scale,
                [
                    Part.of(f"{name}.{one}", weight, _outputs(self._units_of))
                    for one, weight in weights.items()
                ],
            ),
            down=self._row_split(f"{name}.down_proj", mlp.down_proj),
        )

    def _linear(
        self, weight: Weight, bias: torch.Tensor | None, scale: torch.Tensor | None, parts: Sequence[Part]
    ) -> AnyLinear:
        base = make_linear(weight, bias, scale, dtype=self.dtype)
        return base if self.adapters is None else self.adapters.adapted(base, parts, scale)

    def _queries(self, weight: Weight) -> Weight:
        return self._heads_of(weight, self.heads, is_rotated=True)

    def _keys(self, weight: Weight) -> Weight:
        return self._heads_of(weight, self.kv_heads, is_rotated=True)

    def _values(self, weight: Weight) -> Weight:
        return self._heads_of(weight, self.kv_heads)

    def _heads_of(self, weight: Weight, heads: int, *, is_rotated: bool = False) -> Weight:
        size = heads * self.head_dim
        own = torch.arange(self.rank * size, (self.rank + 1) * size, device=weight.device)
        return rows(weight, paired(own, self.head_dim) if is_rotated else own).to(self.device)

    def _columns(self, bias: torch.Tensor, heads: int) -> torch.Tensor:
        size = heads * self.head_dim
        return bias[self.rank * size : (self.rank + 1) * size].to(self.device)

    def _units_of(self, weight: Weight) -> Weight:
        size = weight.shape[0] // self.world_size
        return rows(weight, slice(self.rank * size, (self.rank + 1) * size)).to(self.device)

    def _units(self, of_units: torch.Tensor) -> torch.Tensor:
        return of_units.chunk(self.world_size)[self.rank].to(self.device)

    def _row_split(self, name: str, linear: Any) -> AnyLinear:
        # Outputs are summed over the ranks, so only one of them may add the bias.
        bias = linear.bias.to(self.device) if linear.bias is not None and self.rank == 0 else None
        weight = weight_of(linear)
        return self._linear(
            self._inputs_of(weight),
            bias,
            None,
            [Part.of(name, weight, lambda low: LowRank(_floats(self._inputs_of(low.down)), low.up))],
        )

    def _inputs_of(self, weight: Weight) -> Weight:
        size = weight.shape[1] // self.world_size
        return columns(weight, self.rank * size, (self.rank + 1) * size, self.dtype).to(self.device)


def _outputs(cut: Callable[[Weight], Weight]) -> Callable[[LowRank], LowRank]:
    """Cuts outputs out of what is added to a layer, as `cut` does out of its weight."""
    return lambda low: LowRank(low.down, _floats(cut(low.up)))


def _floats(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)  # adapters have no quantized weights
    return weight


def _scale(norm: Any, gain: float) -> torch.Tensor:
    """The scales [hidden] of a norm times `gain`: what the linear map after it multiplies its input by."""
    scale: torch.Tensor = norm.weight.detach().float() * gain
    return scale
