"""How many of a mixture's experts a token is sent to, as seen in a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.separated_experts import SeparatedExperts


@dataclass(slots=True)
class Routing:
    """What was seen of a model's experts.

    Attributes:
        share: of a layer's experts, how many each token is sent to; of layers that differ the largest share.
            0 for a model without experts, or with some that Transformers' interface does not know.
    """

    share: float = 0.0

    def _note(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index, count = args[1] if len(args) > 1 else kwargs.get("top_k_index"), module.num_experts
        if isinstance(index, torch.Tensor) and index.dim() == 2 and isinstance(count, int):
            self.share = max(self.share, index.shape[1] / count)


@contextmanager
def routing_of(model: torch.nn.Module) -> Iterator[Routing]:
    """Look at the experts of a Transformers model during the forwards within.

    Names in configurations differ (`num_experts`, `num_local_experts`, `n_routed_experts`, `moe_topk`), the
    interface of experts does not: a module with `num_experts` matrices in each of its weights, called with
    hidden states, experts' numbers [rows, experts per token] and their weights.
    """
    found = Routing()
    hooks = [
        module.register_forward_pre_hook(found._note, with_kwargs=True)
        for module in model.modules()
        if _holds_experts(module)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _holds_experts(module: torch.nn.Module) -> bool:
    if isinstance(module, SeparatedExperts):
        return True
    count = getattr(module, "num_experts", None)
    own = [weight for weight in module.parameters(recurse=False) if weight.dim() == 3]
    return isinstance(count, int) and bool(own) and all(len(weight) == count for weight in own)
