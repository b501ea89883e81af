"""Weights of mixtures of experts, cut out of Transformers' models for `engine.mixture`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from engine.experts import Experts, FeedForward, SeparateExperts
from engine.grouped_experts import GroupedExperts, TritonRouter
from engine.mixture import Mixture, Router, SharedExpert, TopRouter
from engine.quantized_linear import make_linear
from engine.triton_support import runs_triton, why_not_triton
from engine.weight_parts import Weight, joined, weight_of, widened

#: Model types whose feed-forward layers, or some of them, are mixtures that `mixture_of` takes.
MIXTURES = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})

Cut = Callable[[Weight], Weight]
"""Cuts one rank's outputs, or inputs, out of a matrix, and puts them where it computes."""


def units_of(config: Any) -> dict[str, int]:
    """Units of the feed-forward networks of a Transformers configuration, by its names for them."""
    kind, names = _kind(config), ["intermediate_size"]
    if kind != "mixtral" and expert_share(config):
        has_dense = not all(map(partial(_is_sparse, config), _layers(config)))
        names = ["moe_intermediate_size", *(names if has_dense else [])]
        if kind == "qwen2_moe":
            names.append("shared_expert_intermediate_size")
    return {name: int(getattr(config, name)) for name in names}


def _kind(config: Any) -> str:
    return getattr(config, "model_type", "")  # not said of what is on record: see `StoredConfig`


def expert_share(config: Any) -> float:
    """Of a layer's experts, how many each row is sent to; 0 of a model without any."""
    kind = _kind(config)
    count = getattr(config, "num_local_experts" if kind == "mixtral" else "num_experts", 0)
    if kind not in MIXTURES or not count or not any(map(partial(_is_sparse, config), _layers(config))):
        return 0.0
    return float(config.num_experts_per_tok / count)


def _layers(config: Any) -> range:
    return range(config.num_hidden_layers)


def _is_sparse(config: Any, layer: int) -> bool:
    """Whether a layer of one of `MIXTURES` with experts is a mixture, as their own code has it."""
    if _kind(config) == "mixtral":
        return True
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0


def why_not_experts(config: Any, device: torch.device) -> str | None:
    """What keeps mixtures, if a model has any, from being computed there by `mixture_of`; None if nothing.

    Experts that are asked one after the other cannot be captured.
    """
    if device.type == "cpu" or not expert_share(config):
        return None
    why = why_not_triton(device)
    return None if why is None else f"its experts on {device} need Triton: {why}"


def is_mixture(mlp: Any) -> bool:
    """Whether a feed-forward module of a Transformers model is one."""
    return hasattr(mlp, "experts")


def mixture_of(
    mlp: Any,
    gain: torch.Tensor,
    units: Cut,
    inputs: Cut,
    device: torch.device,
    shared: FeedForward | None,
) -> Mixture:
    """The mixture that a Transformers module of one of `MIXTURES` is, or one rank's share of its units.

    Args:
        mlp: the module.
        gain: [hidden], what normalised rows are multiplied by before.
        units: cuts this rank's units out of matrices [units, inputs].
        inputs: the same of matrices [outputs, units].
        device: where it is to be.
        shared: the network of its shared expert, if it has one.
    """
    weight, per_row = mlp.gate.weight.detach().to(device), mlp.gate.top_k
    sums_to_one, dtype = getattr(mlp.gate, "norm_topk_prob", True), weight.dtype
    for_all = None
    if shared is not None:
        own_gate = widened(weight_of(mlp.shared_expert_gate), dtype).detach().to(device)
        for_all = SharedExpert(shared, own_gate)
    cut = [_cut(*matrices, units, inputs, dtype) for matrices in _matrices_of(mlp.experts)]
    router: Router
    experts: Experts
    if runs_triton(device):
        router = TritonRouter(weight, per_row, sums_to_one=sums_to_one)
        gate_up, down = zip(*cut, strict=True)
        experts = GroupedExperts(gate_up, down, dtype)
    else:
        router = TopRouter(weight, per_row, sums_to_one=sums_to_one)
        experts = SeparateExperts([_expert(*matrices, dtype) for matrices in cut])
    return Mixture(router, experts, for_all, gain.to(device, dtype))


def _matrices_of(experts: Any) -> Iterator[tuple[Weight, Weight, Weight]]:
    """Of each expert the matrices of its gate, of what it gates, and of its output."""
    if hasattr(experts, "layers_of"):  # `engine.separated_experts`, whose import brings Transformers along
        for number in range(experts.num_experts):
            gate, up, down = map(weight_of, experts.layers_of(number))
            yield gate, up, down
        return
    for both, down in zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True):
        yield (*both.chunk(2), down)


def _cut(
    gate: Weight, up: Weight, down: Weight, units: Cut, inputs: Cut, dtype: torch.dtype
) -> tuple[Weight, Weight]:
    """One rank's share: gates with what they gate, and outputs."""
    return joined([units(gate), units(up)], dtype), inputs(down)


def _expert(gate_up: Weight, down: Weight, dtype: torch.dtype) -> FeedForward:
    return FeedForward(make_linear(gate_up, dtype=dtype), make_linear(down, dtype=dtype))
