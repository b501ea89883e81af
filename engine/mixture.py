"""A feed-forward layer that is a mixture of experts: who is sent where, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.experts import Experts, FeedForward


class Router(Protocol):
    """Sends rows to experts."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For `x` [rows, hidden] int64 [rows, experts per row], and what they count for, float32."""
        ...


class TopRouter:
    """`Router` to the experts of the highest probabilities (Mixtral; Qwen2-MoE; Qwen3-MoE).

    Attributes:
        weight: [experts, hidden].
        per_row: how many experts a row is sent to.
        sums_to_one: whether the probabilities of those are divided by their sum.
    """

    def __init__(self, weight: torch.Tensor, per_row: int, *, sums_to_one: bool) -> None:
        self.weight, self.per_row, self.sums_to_one = weight, per_row, sums_to_one

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Router`."""
        probabilities = F.linear(x, self.weight).softmax(dim=1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.per_row, dim=1)
        if self.sums_to_one:
            weights = weights / weights.sum(dim=1, keepdim=True)
        return chosen, weights


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """One that all rows are sent to, each as far as a gate of its own says (Qwen2-MoE).

    Attributes:
        expert: the network.
        gate: [1, hidden].
    """

    expert: FeedForward
    gate: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] of `x` [rows, hidden]."""
        return self.expert(x).mul_(F.linear(x, self.gate).sigmoid())


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """The layer, or of its experts' units one rank's share.

    Attributes:
        router: who is sent where; the same on all ranks.
        experts: the networks.
        shared: one beside them, for all rows; None if there is none.
        gain: [hidden], what normalised rows are to be multiplied by before.
    """

    router: Router
    experts: Experts
    shared: SharedExpert | None
    gain: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] of normalised `x` [rows, hidden], to be added up over the ranks."""
        total = self.experts(x, *self.router(x))
        return total if self.shared is None else total.add_(self.shared(x))
