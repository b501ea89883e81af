"""Low-rank adapters while they are trained (LoRA; Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

RANK = 8
ALPHA = 16
#: The linear layers of a decoder layer that have an adapter: all of them.
MODULES: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class AdaptedLinear(nn.Module):
    """A linear layer that stays as it is, and what is learned beside it: y = W x + alpha / r * B A x.

    ``down`` is the paper's A, float32 [RANK, in features], and ``up`` its B, float32 [out features, RANK].
    They are no ``nn.Linear``, whose matrices ``SharedOptimizer`` would give to Muon: AdamW steps them, as in
    the paper.
    """

    def __init__(self, base: nn.Linear) -> None:
        """Beside ``base``, to whose output it adds nothing yet: B is zero, and A as PEFT begins it."""
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.empty(RANK, base.in_features, device=base.weight.device))
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK, device=base.weight.device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """[..., out features] of [..., in features]."""
        added = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        output: Tensor = self.base(x)
        return output + ALPHA / RANK * added


def adapt(model: LlamaForCausalLM) -> dict[str, AdaptedLinear]:
    """Put an adapter that changes nothing yet into all linear layers of the model's decoder layers.

    Nothing else of the model is trained any more. Returns what was put in, by the layer's name in the model.
    """
    model.requires_grad_(requires_grad=False)
    adapted: dict[str, AdaptedLinear] = {}
    for name, layer in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if own in MODULES and isinstance(layer, nn.Linear):
            adapted[name] = AdaptedLinear(layer)
            setattr(model.get_submodule(parent), own, adapted[name])
    return adapted
