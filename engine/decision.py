"""Decided tokens, where the logits are, and on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.devices import Transfer


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome of `engine.sampling.decide`, where the logits are.

    Attributes:
        tokens: int64 [n], the chosen token of each row.
        gap: float32 [n], best minus second-best score; near zero, rounding may decide (a near tie).
    """

    tokens: torch.Tensor
    gap: torch.Tensor

    def sent(self) -> DecisionSent:
        """The same on its way to the host, which does not wait."""
        if self.tokens.device.type == "cpu":
            return DecisionSent(self, None)
        # Token ids and float32 are exact in float64.
        return DecisionSent(self, Transfer(torch.stack((self.tokens.double(), self.gap.double()))))

    def fetch(self) -> tuple[list[int], list[float]]:
        """Tokens and gaps on the host, which waits for the device once."""
        return self.sent().fetch()


@dataclass(frozen=True, slots=True)
class DecisionSent:
    """A decision on its way to the host.

    Attributes:
        decision: where the logits are.
        transfer: of float64 [2, n], tokens and gaps; None on a CPU.
    """

    decision: Decision
    transfer: Transfer | None

    @property
    def has_arrived(self) -> bool:
        """Whether `fetch` would not wait."""
        return self.transfer is None or self.transfer.has_arrived

    def fetch(self) -> tuple[list[int], list[float]]:
        """Tokens and gaps, once they are there."""
        if self.transfer is None:
            return self.decision.tokens.tolist(), self.decision.gap.tolist()
        tokens, gap = self.transfer.wait()
        return tokens.long().tolist(), gap.tolist()
