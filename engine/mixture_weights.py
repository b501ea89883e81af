"""Weights of mixtures of experts, cut out of Transformers' models for `engine.mixture`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.experts import Expert, Experts, SeparateExperts
from engine.grouped_experts import GroupedExperts, TritonRouter
from engine.linear import Linear
from engine.mixture import Mixture, Router, SharedExpert, TopRouter
from engine.triton_support import runs_triton, why_not_triton

#: Model types whose feed-forward layers, or some of them, are mixtures that `mixture_of` takes.
MIXTURES = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})

Units = Callable[[torch.Tensor], torch.Tensor]
"""Cuts one rank's rows out of [units, inputs], and puts them where it computes."""


def units_of(config: Any) -> dict[str, int]:
    """How many units the feed-forward networks of a Transformers configuration have, by its names for them."""
    kind, names = _kind(config), ["intermediate_size"]
    if kind in ("qwen2_moe", "qwen3_moe"):
        has_dense = bool(config.mlp_only_layers) or config.decoder_sparse_step > 1
        names = ["moe_intermediate_size", *(names if has_dense else [])]
    if kind == "qwen2_moe":
        names.append("shared_expert_intermediate_size")
    return {name: int(getattr(config, name)) for name in names}


def _kind(config: Any) -> str:
    return getattr(config, "model_type", "")  # not said of what is on record: see `StoredConfig`


def expert_share(config: Any) -> float:
    """Of a layer's experts, how many each row is sent to; 0 of a model without any."""
    if _kind(config) not in MIXTURES:
        return 0.0
    count = getattr(config, "num_experts", None) or config.num_local_experts
    return float(config.num_experts_per_tok / count)


def why_not_experts(config: Any, device: torch.device) -> str | None:
    """What keeps a model's mixtures, if it has any, from being computed there by `mixture_of`; None if nothing.

    Experts that are asked one after the other cannot be captured.
    """
    if device.type == "cpu" or not expert_share(config):
        return None
    why = why_not_triton(device)
    return None if why is None else f"its experts on {device} need Triton: {why}"


def is_mixture(mlp: Any) -> bool:
    """Whether a feed-forward module of a Transformers model is one."""
    return hasattr(mlp, "experts")


def mixture_of(mlp: Any, gain: torch.Tensor, units: Units, device: torch.device) -> Mixture:
    """The mixture that a Transformers module of one of `MIXTURES` is, or one rank's share of its units.

    Args:
        mlp: the module.
        gain: [hidden], what normalised rows are multiplied by before.
        units: see `Units`.
        device: where it is to be.
    """
    weight, sums_to_one = mlp.gate.weight.detach().to(device), getattr(mlp.gate, "norm_topk_prob", True)
    shared = None
    if getattr(mlp, "shared_expert", None) is not None:
        one = mlp.shared_expert
        both = torch.cat([one.gate_proj.weight.detach(), one.up_proj.weight.detach()])
        own_gate = mlp.shared_expert_gate.weight.detach().to(device)
        shared = SharedExpert(_expert(both, one.down_proj.weight.detach(), units), own_gate)
    router: Router
    experts: Experts
    matrices = zip(mlp.experts.gate_up_proj.detach(), mlp.experts.down_proj.detach(), strict=True)
    if runs_triton(device):
        router = TritonRouter(weight, mlp.gate.top_k, sums_to_one=sums_to_one)
        cut = [_cut(one, other, units) for one, other in matrices]
        experts = GroupedExperts(
            torch.stack([one for one, _ in cut]), torch.stack([other for _, other in cut])
        )
    else:
        router = TopRouter(weight, mlp.gate.top_k, sums_to_one=sums_to_one)
        experts = SeparateExperts([_expert(one, other, units) for one, other in matrices])
    return Mixture(router, experts, shared, gain.to(device, weight.dtype))


def _expert(gate_up: torch.Tensor, down: torch.Tensor, units: Units) -> Expert:
    both, back = _cut(gate_up, down, units)
    return Expert(Linear(both), Linear(back))


def _cut(gate_up: torch.Tensor, down: torch.Tensor, units: Units) -> tuple[torch.Tensor, torch.Tensor]:
    """Of [2 * units, hidden] and [hidden, units] one rank's."""
    both = torch.cat([units(half) for half in gate_up.chunk(2)])
    return both, units(down.t()).t().contiguous()
