"""Captured layers of EAGLE's chains: one launch a layer, with all that chooses its tokens.

A chain's next token is the best one, and the path goes on with it unless it ends there. So a captured layer
finds its own tokens, as a model drafter's does (`drafters.captured_layers`), and the host launches nothing
beside it: around the forward alone (`verifier.eagle_graphs`) it launches as long as the GPU computes, twice.
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


class CapturedChains:
    """The layers of so many requests' chains.

    Attributes:
        graph: of `compute`, once captured.
    """

    def __init__(
        self, layer: EagleLayer, requests: int, max_tokens: int, spare: int, hidden: torch.Tensor
    ) -> None:
        """Of nobody, until `begin`; `hidden` [requests or more, hidden] is what layers hand on."""
        assert isinstance(layer.attention, TritonAttention)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._layer, self._hidden, device = layer, hidden[:requests], hidden.device
        self._token = torch.zeros(requests, 1, dtype=torch.int64, device=device)
        self._rows = MovingRows(
            layer.attention,
            BeamShape(requests, 1),
            max_tokens=max_tokens,
            spare=spare,
            tokens=self._token.view(-1),
        )
        self._stops = torch.full((requests, MOST_STOPS), -1, dtype=torch.int64, device=device)
        self._least = torch.full((requests, 1), -torch.inf, dtype=torch.float64, device=device)
        self._path, self._open = torch.zeros(2, requests, 1, device=device).unbind(0)
        # Of each layer, beginning with the one that is not forwarded for.
        self._tokens = torch.zeros(MOST_LAYERS + 1, requests, dtype=torch.int64, device=device)
        self._logps = torch.zeros(MOST_LAYERS + 1, requests, device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._parent = torch.zeros(requests, 1, dtype=torch.int64, device=device)
        self._told: tuple[list[list[int]], list[float]] | None = None
        self._num_requests = self._num_layers = 0

    def begin(self, chains: Sequence[BeamRows], roots: torch.Tensor, asking: Sequence[Asking]) -> bool:
        """Describe the chains after `roots` [requests, hidden]; False if they find no room."""
        if not self._rows.holds(chains):
            return False
        self._rows.begin(chains)
        self._num_requests, self._num_layers = len(chains), 0
        self._hidden[: len(chains)].copy_(roots)
        self._tell(asking)
        return True

    def _tell(self, asking: Sequence[Asking]) -> None:
        """Where chains end, if that is not what the device knows."""
        told = ends(asking), [one.stop_token_logp for one in asking]
        if told == self._told:
            return
        self._told = told
        stops = np.full(self._stops.shape, -1, dtype=np.int64)
        least = np.full(self._least.shape, -np.inf)
        for number, (of_request, bound) in enumerate(zip(*told, strict=True)):
            stops[number, : len(of_request)] = of_request
            least[number] = bound
        overwrite(self._stops, stops)
        overwrite(self._least, least)

    def first(self, logp: torch.Tensor, token: torch.Tensor) -> Beams:
        """The layer after the roots, of their best next tokens [requests, 1]."""
        n = self._num_requests
        self._token[:n].copy_(token)
        self._path[:n].copy_(logp)
        self._open[:n].copy_(self._going_on(token, logp, logp))
        self._tokens[0, :n].copy_(token.view(-1))
        self._logps[0, :n].copy_(logp.view(-1))
        self._number.fill_(1)
        self._num_layers = 1
        return self._newest()

    def next(self) -> Beams:
        """The layer after; its tensors are valid until the next one's."""
        assert self.graph is not None
        self.graph.replay()
        self._num_layers += 1
        return self._newest()

    def found(self) -> torch.Tensor:
        """float64 [3, requests, layers, 1], tokens, parents and log-probabilities of all layers."""
        token, logp = (
            of[: self._num_layers, : self._num_requests].T.unsqueeze(2).double()
            for of in (self._tokens, self._logps)
        )
        return torch.stack((token, torch.zeros_like(logp), logp))

    def compute(self) -> None:
        """The next layer; captured."""
        self._rows.move_on()
        made = self._layer.forward(self._hidden, self._rows.tokens, self._rows.positions, self._rows.plan)
        logp, token = highest_log_probabilities(self._layer.logits(made), 1)
        if (token_of := self._layer.weights.token_of) is not None:
            token = token_of[token]
        self._hidden.copy_(made)
        path = self._open + logp
        self._token.copy_(token)
        self._path.copy_(path)
        self._open.copy_(self._going_on(token, logp, path))
        self._tokens.index_copy_(0, self._number, token.view(1, -1))
        self._logps.index_copy_(0, self._number, logp.view(1, -1))
        self._number.add_(1)

    def _going_on(self, token: torch.Tensor, logp: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """`path` of tokens that get a child, minus infinity for others, as of `eagle_beams.Growth`."""
        n = len(token)
        is_closed = (token == self._stops[:n]).any(dim=1, keepdim=True) | (logp.double() < self._least[:n])
        return path.masked_fill(is_closed, -torch.inf)

    def _newest(self) -> Beams:
        n, number = self._num_requests, self._num_layers - 1
        logp = self._logps[number, :n].unsqueeze(1)
        return Beams(self._token[:n], self._parent[:n], logp, self._path[:n], self._open[:n])


def ends(asking: Sequence[Asking]) -> list[list[int]]:
    """Tokens that end each request."""
    return [sorted(one.state.stop_token_ids) for one in asking]
