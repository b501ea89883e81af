"""Beams of EAGLE's drafts as tensors on the target's device, which the host does not wait for.

They grow as `engine.beam` says: the best paths of each layer are kept, and a token that ends its request,
or that the layer is not sure enough of, stays a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.devices import to_device
from verifier.proposing import Asking


@dataclass(frozen=True, slots=True, eq=False)
class Beams:
    """A layer of all beams, best path first: tensors [requests, width].

    Attributes:
        token, parent: int64; which of the layer before is the parent, 0 in the first.
        logp, path_logp: float32, of the token given its parent, and of the path; a path of minus infinity is
            no node, but fills a layer that has too few.
        open_logp: float32, `path_logp` of nodes that get children, minus infinity elsewhere.
    """

    token: torch.Tensor
    parent: torch.Tensor
    logp: torch.Tensor
    path_logp: torch.Tensor
    open_logp: torch.Tensor


class Growth:
    """How the beams of a call grow.

    Args:
        stops: int64 [requests, 1, tokens], those that end each request, filled up with -1; None if none do.
        least: float64 [requests, 1], what a token must have for children; None if that is asked of none.
    """

    def __init__(self, stops: torch.Tensor | None, least: torch.Tensor | None) -> None:
        self._stops, self._least = stops, least

    @classmethod
    def of(cls, asking: Sequence[Asking], device: torch.device) -> Growth:
        """Of these requests, in order."""
        tokens = ends(asking)
        stops = least = None
        if most := max(map(len, tokens)):
            filled = [one + [-1] * (most - len(one)) for one in tokens]
            stops = to_device(torch.tensor(filled, dtype=torch.int64), device).unsqueeze(1)
        bounds = np.array([one.stop_token_logp for one in asking])  # float64, as the host compares them
        if (bounds > -np.inf).any():
            least = to_device(torch.from_numpy(bounds), device).unsqueeze(1)
        return cls(stops, least)

    def first(self, logp: torch.Tensor, token: torch.Tensor) -> Beams:
        """The layer after the roots, of their best next tokens [requests, width]."""
        return self._layer(token, torch.zeros_like(token), logp, logp)

    def next(self, layer: Beams, logp: torch.Tensor, token: torch.Tensor) -> Beams:
        """The layer after: the best paths of those that go on with `token` [requests * width, k]."""
        n, width = layer.token.shape
        if width == 1:
            return self._layer(token, layer.parent, logp, layer.open_logp + logp)
        k = token.shape[1]
        paths = layer.open_logp.unsqueeze(2) + logp.view(n, width, k)
        best, index = paths.flatten(1).sort(dim=1, descending=True, stable=True)
        best, index = best[:, :width], index[:, :width]
        return self._layer(
            token.view(n, -1).gather(1, index), index // k, logp.view(n, -1).gather(1, index), best
        )

    def _layer(
        self, token: torch.Tensor, parent: torch.Tensor, logp: torch.Tensor, path_logp: torch.Tensor
    ) -> Beams:
        is_closed: torch.Tensor | None = None
        if self._stops is not None:
            is_closed = (token.unsqueeze(2) == self._stops).any(dim=2)
        if self._least is not None:
            is_unsure = logp.double() < self._least
            is_closed = is_unsure if is_closed is None else is_closed | is_unsure
        open_logp = path_logp if is_closed is None else path_logp.masked_fill(is_closed, -torch.inf)
        return Beams(token, parent, logp, path_logp, open_logp)


def ends(asking: Sequence[Asking]) -> list[list[int]]:
    """Tokens that end each request."""
    return [sorted(one.state.stop_token_ids) for one in asking]
