"""Shape and rotary embedding of EAGLE's layer, as its configuration has them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

# Of a flat configuration, what would be taken for a whole model's.
_NOT_OF_LAYER = frozenset(
    {"architectures", "auto_map", "dtype", "layer_types", "torch_dtype", "transformers_version"}
)
# What has to be said for Transformers not to be asked what is meant.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


class EagleShape(NamedTuple):
    """Of a Llama layer.

    Attributes:
        hidden_size: of the hidden state.
        num_units: of its MLP.
        heads, kv_heads, head_dim: of its attention.
        eps: of its norms.
        rotary: with the attributes `inv_freq` and `attention_scaling`.
    """

    hidden_size: int
    num_units: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rotary: Any


def eagle_shape(layer: Mapping[str, Any], max_tokens: int) -> EagleShape:
    """The shape that a configuration says.

    One that says all there is to know, and has rotary embeddings without scaling, is understood here: to
    import Transformers for it takes a worker seconds. Others are Transformers' to understand.

    Args:
        layer: the configuration.
        max_tokens: longest sequence.

    Raises:
        Exception: of more than one kind, if it is no Llama layer's.
    """
    return _plain(layer) or _by_transformers(layer, max_tokens)


def _plain(layer: Mapping[str, Any]) -> EagleShape | None:
    sizes = [layer.get(name) for name in _SIZES]
    eps, theta = layer.get("rms_norm_eps"), _theta(layer)
    if not all(type(size) is int and size > 0 for size in sizes) or theta is None or type(eps) is not float:
        return None
    width, units, heads, kv_heads = map(int, filter(None, sizes))
    dim = layer.get("head_dim") or width // heads
    if type(dim) is not int or dim <= 0 or dim % 2 or width % heads or heads % kv_heads:
        return None
    inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float, device="cpu") / dim))
    rotary = SimpleNamespace(inv_freq=inv_freq, attention_scaling=1.0)
    return EagleShape(width, units, heads, kv_heads, dim, eps, rotary)


def _theta(layer: Mapping[str, Any]) -> float | None:
    """Base of the frequencies; None if it is not said, or if there is more to them."""
    said = layer.get("rope_parameters")
    if said is None:
        said = {"rope_theta": layer.get("rope_theta"), "rope_type": layer.get("rope_scaling") or "default"}
    if not isinstance(said, Mapping) or said.keys() != {"rope_theta", "rope_type"}:
        return None
    is_more = said["rope_type"] != "default" or layer.get("partial_rotary_factor", 1.0) != 1.0
    theta = said["rope_theta"]
    return None if is_more or type(theta) not in (int, float) or theta <= 0 else float(theta)


def _by_transformers(layer: Mapping[str, Any], max_tokens: int) -> EagleShape:
    # Here, for most do without.
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    found = LlamaConfig(**{name: value for name, value in layer.items() if name not in _NOT_OF_LAYER})
    found.max_position_embeddings = max(found.max_position_embeddings, max_tokens)
    heads = found.num_attention_heads
    return EagleShape(
        found.hidden_size,
        found.intermediate_size,
        heads,
        found.num_key_value_heads,
        int(found.head_dim or found.hidden_size // heads),
        float(found.rms_norm_eps),
        LlamaRotaryEmbedding(found),
    )
