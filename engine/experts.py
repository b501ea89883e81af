"""Experts of a mixture, each by itself: feed-forward networks, of which every row is sent to a few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.adapted_linear import AdaptedLinear
from engine.gated import gate
from engine.linear import Linear
from engine.quantized_linear import QuantizedLinear

AnyLinear = Linear | QuantizedLinear | AdaptedLinear


class Experts(Protocol):
    """All experts of a layer, or one rank's share of their units."""

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What a row's experts make of it, times their weights and added up.

        Args:
            x: [rows, hidden].
            chosen: int64 [rows, experts per row], their numbers.
            weights: float32 [rows, experts per row].

        Returns:
            [rows, hidden].
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """A feed-forward network: `gate_up` yields gate then up."""

    gate_up: AnyLinear
    down: AnyLinear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] of `x` [rows, hidden], which has all norms and gains."""
        return self.down(gate(self.gate_up(x)))


class SeparateExperts:
    """`Experts` that are asked one after the other, each for the rows sent to it.

    For CPUs: the host has to know who is sent where. What a row gets is added up in the order of experts'
    numbers, whoever else is there.
    """

    def __init__(self, experts: Sequence[FeedForward]) -> None:
        self._experts = list(experts)

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        total = torch.zeros_like(x)
        if len(x) == 1:
            for expert, weight in sorted(zip(chosen[0].tolist(), weights[0].tolist(), strict=True)):
                total.add_(self._experts[expert](x).mul_(weight))
            return total
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        of_row = order.div(chosen.shape[1], rounding_mode="floor")
        given, by = x.index_select(0, of_row), weights.reshape(-1).index_select(0, order).unsqueeze(1)
        first = 0
        for expert, count in zip(
            self._experts, flat.bincount(minlength=len(self._experts)).tolist(), strict=True
        ):
            if count:
                mine = slice(first, first + count)
                total.index_add_(0, of_row[mine], expert(given[mine]).mul_(by[mine]))
                first += count
        return total
