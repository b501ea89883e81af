"""Captured layers of EAGLE's beams that grow by themselves: one launch a layer, and its tokens are chosen.

What comes after a layer's tokens, and which paths go on, depends on nothing but the layer before where tokens
are ranked by logits alone. So a captured layer finds its own, as a model drafter's does
(`drafters.captured_layers`), and the host launches nothing beside it: around the forward alone
(`verifier.eagle_graphs`) it launches for longer than the GPU computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.best_tokens import highest_log_probabilities
from engine.devices import overwrite
from engine.eagle import EagleLayer
from engine.moving_rows import MOST_LAYERS, BeamRows, BeamShape, MovingRows
from engine.triton_attention import TritonAttention
from verifier.eagle_beams import Beams
from verifier.proposing import Asking

#: Tokens that end a request, at most.
MOST_STOPS = 8


class GrowingLayers:
    """The layers of beams of one shape, which grow as `eagle_beams.Growth` says.

    Attributes:
        graph: of `compute`, once captured.
    """

    def __init__(
        self, layer: EagleLayer, shape: BeamShape, max_tokens: int, spare: int, hidden: torch.Tensor
    ) -> None:
        """Of nobody, until `begin`; `hidden` [rows or more, hidden] is what layers hand on."""
        assert isinstance(layer.attention, TritonAttention)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._layer, self._shape = layer, shape
        self._hidden, device, integer = hidden[: shape.num_rows], hidden.device, torch.int64
        self._token, self._parent = torch.zeros(2, *shape, dtype=integer, device=device).unbind(0)
        self._logp, self._path, self._open = torch.zeros(3, *shape, device=device).unbind(0)
        self._rows = MovingRows(
            layer.attention, shape, max_tokens=max_tokens, spare=spare, tokens=self._token.view(-1)
        )
        self._first_rows = torch.arange(shape.requests, device=device).unsqueeze(1) * shape.width
        self._stops = torch.full((shape.requests, 1, MOST_STOPS), -1, dtype=integer, device=device)
        self._least = torch.full((shape.requests, 1), -torch.inf, dtype=torch.float64, device=device)
        # Of each layer, beginning with the one that is not forwarded for: tokens and parents, and by them
        # their log-probabilities. All are exact in float64.
        self._found = torch.zeros(MOST_LAYERS + 1, 3, *shape, dtype=torch.float64, device=device)
        self._number = torch.zeros(1, dtype=integer, device=device)
        self._told: tuple[list[list[int]], list[float]] | None = None
        self._num_requests = self._num_layers = 0

    def begin(self, beams: Sequence[BeamRows], roots: torch.Tensor, asking: Sequence[Asking]) -> bool:
        """Describe the beams after `roots` [requests, hidden]; False if they find no room."""
        if not self._rows.holds(beams):
            return False
        self._rows.begin(beams)
        self._num_requests = n = len(beams)
        width = self._shape.width
        hidden = self._hidden[: n * width].view(n, width, -1)
        hidden.copy_(roots.unsqueeze(1).expand_as(hidden))
        self._tell(asking)
        return True

    def _tell(self, asking: Sequence[Asking]) -> None:
        """Where paths end, if that is not what the device knows."""
        told = ends(asking), [one.stop_token_logp for one in asking]
        if told == self._told:
            return
        self._told = told
        stops = np.full(self._stops.shape, -1, dtype=np.int64)
        least = np.full(self._least.shape, -np.inf)
        for number, (of_request, bound) in enumerate(zip(*told, strict=True)):
            stops[number, 0, : len(of_request)] = of_request
            least[number] = bound
        overwrite(self._stops, stops)
        overwrite(self._least, least)

    def first(self, logp: torch.Tensor, token: torch.Tensor) -> Beams:
        """The layer after the roots, of their best next tokens [requests, width]."""
        n = self._num_requests
        self._number.zero_()
        self._parent.zero_()
        self._token[:n].copy_(token)
        self._logp[:n].copy_(logp)
        self._path[:n].copy_(logp)
        self._note()
        self._num_layers = 1
        return self._newest()

    def next(self) -> Beams:
        """The layer after; its tensors are valid until the next one's."""
        assert self.graph is not None
        self.graph.replay()
        self._num_layers += 1
        return self._newest()

    def found(self) -> torch.Tensor:
        """float64 [3, requests, layers, width], tokens, parents and log-probabilities of all layers."""
        return self._found[: self._num_layers, :, : self._num_requests].permute(1, 2, 0, 3)

    def compute(self) -> None:
        """The next layer; captured."""
        rows, (requests, width), hidden = self._rows, self._shape, self._hidden
        if width > 1:
            rows.see_from(self._parent)
            hidden = hidden.index_select(0, (self._parent + self._first_rows).flatten())
        rows.move_on()
        made = self._layer.forward(hidden, rows.tokens, rows.positions, rows.plan)
        logp, token = highest_log_probabilities(self._layer.logits(made), width)
        if (token_of := self._layer.weights.token_of) is not None:
            token = token_of[token]
        self._hidden.copy_(made)
        logp, token = logp.view(requests, -1), token.view(requests, -1)
        if width == 1:
            self._path.copy_(self._open + logp)
        else:
            # Of the children of all rows the best paths.
            paths = (self._open.unsqueeze(2) + logp.view(requests, width, -1)).flatten(1)
            best, index = paths.sort(dim=1, descending=True, stable=True)
            index = index[:, :width]
            self._path.copy_(best[:, :width])
            self._parent.copy_(index // (token.shape[1] // width))
            logp, token = logp.gather(1, index), token.gather(1, index)
        self._token.copy_(token)
        self._logp.copy_(logp)
        self._note()

    def _note(self) -> None:
        """Which of the newest layer's paths go on, and what it is."""
        is_closed = (self._token.unsqueeze(2) == self._stops).any(dim=2)
        is_closed |= self._logp.double() < self._least
        self._open.copy_(self._path.masked_fill(is_closed, -torch.inf))
        newest = torch.stack((self._token.double(), self._parent.double(), self._logp.double()))
        self._found.index_copy_(0, self._number, newest.unsqueeze(0))
        self._number.add_(1)

    def _newest(self) -> Beams:
        n = self._num_requests
        return Beams(self._token[:n], self._parent[:n], self._logp[:n], self._path[:n], self._open[:n])


def ends(asking: Sequence[Asking]) -> list[list[int]]:
    """Tokens that end each request."""
    return [sorted(one.state.stop_token_ids) for one in asking]
