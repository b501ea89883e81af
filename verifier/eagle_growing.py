"""Captured layers of EAGLE's beams that grow by themselves: one launch a layer, and its tokens are chosen.

What comes after a layer's tokens, and which paths go on, depends on nothing but the layer before, and on the
noise of the position where a request samples. So a captured layer finds its own, as a model drafter's does
(`drafters.captured_layers`), and the host launches nothing beside it: around the forward alone
(`verifier.eagle_graphs`) it launches for longer than the GPU computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.best_tokens import highest_log_probabilities
from engine.devices import overwrite
from engine.eagle import EagleLayer
from engine.moving_rows import MOST_LAYERS, BeamRows, BeamShape, MovingRows
from engine.triton_attention import TritonAttention
from engine.triton_sampling import FIELDS, POSITION, shape_rows
from verifier.eagle_beams import Beams, Growth
from verifier.eagle_forwards import Roots

Int32 = NDArray[np.int32]

#: Tokens that end a request, at most.
MOST_STOPS = 8


class GrowingShape(NamedTuple):
    """Of layers that grow by themselves: of what beams, and whether some request samples."""

    beams: BeamShape
    is_sampled: bool

    @property
    def num_rows(self) -> int:
        """Of a layer."""
        return self.beams.num_rows

    def serves(self, other: Any) -> bool:
        """Whether layers of another shape may be computed in this one: it holds them, and not much more."""
        assert isinstance(other, GrowingShape)
        return self.is_sampled >= other.is_sampled and self.beams.serves(other.beams)


class GrowingLayers:
    """The layers of beams of one shape, which grow as `eagle_beams.Growth` says.

    Attributes:
        graph: of `compute`, once captured.
        held: what the layer after the roots is captured for (`LastRows`); None before.
        num_layers: that are there.
        shape: which.
    """

    def __init__(
        self,
        layer: EagleLayer,
        shape: GrowingShape,
        *,
        max_tokens: int,
        vocab_size: int,
        spare: int,
        hidden: torch.Tensor,
    ) -> None:
        """Of nobody, until `begin`; `hidden` [rows or more, hidden] is what layers hand on."""
        assert isinstance(layer.attention, TritonAttention)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.held: tuple[torch.Tensor, torch.Tensor] | None = None
        self._first: torch.cuda.CUDAGraph | None = None
        self._layer, self.shape, self._vocab_size = layer, shape, vocab_size
        self._hidden, device, integer = hidden[: shape.num_rows], hidden.device, torch.int64
        (requests, width), rows = shape.beams, shape.num_rows
        # The newest layer, of all beams of the shape.
        self._all = Beams(
            *torch.zeros(2, requests, width, dtype=integer, device=device).unbind(0),
            *torch.zeros(3, requests, width, device=device).unbind(0),
        )
        self._rows = MovingRows(
            layer.attention, shape.beams, max_tokens=max_tokens, spare=spare, tokens=self._all.token.view(-1)
        )
        self._first_rows = torch.arange(requests, device=device).unsqueeze(1) * width
        self._stops = torch.full((requests, 1, MOST_STOPS), -1, dtype=integer, device=device)
        self._least = torch.full((requests, 1), -torch.inf, dtype=torch.float64, device=device)
        # How the tokens after a layer's rows are ranked (`described_rows`); all greedy.
        self._table = torch.zeros(rows, FIELDS, dtype=torch.int32, device=device)
        self._growth = Growth(self._stops, self._least)
        # Of each layer, beginning with the one that is not forwarded for: tokens and parents, and by them
        # their log-probabilities. All are exact in float64.
        self._found = torch.zeros(MOST_LAYERS + 1, 3, requests, width, dtype=torch.float64, device=device)
        self._number = torch.zeros(1, dtype=integer, device=device)
        self._told: tuple[list[list[int]], list[float]] | None = None
        self._num_requests = self.num_layers = 0

    def begin(
        self,
        beams: Sequence[BeamRows],
        roots: Roots,
        stops: list[list[int]],
        least: list[float],
        sampling: Int32 | None = None,
    ) -> bool:
        """Find the layer after the roots, and describe the beams' next; False if they find no room.

        By request, `stops` are the tokens that end it, a token with less than `least` has no children, and
        `sampling`, needed where noise is added, is how the first of its tokens is ranked (`described_rows`).
        """
        if not self._rows.holds(beams):
            return False
        self._num_requests, self.num_layers = len(beams), 1
        self._tell(stops, least)
        if self.shape.is_sampled:
            assert sampling is not None
            width = self.shape.beams.width
            overwrite(self._table[: len(beams) * width], sampling.repeat(width, axis=0))
        if self._first is not None and roots.held is self.held:
            self._first.replay()
        else:
            self._begin_with(roots.hidden, roots.scores)
        self._rows.begin(beams)  # while the device is at it
        return True

    def capture_first(
        self,
        held: tuple[torch.Tensor, torch.Tensor],
        capture: Callable[[Callable[[], None]], torch.cuda.CUDAGraph],
    ) -> None:
        """Have the layer after roots in the first rows of `held` captured from now on."""
        hidden, scores = (one[: self.shape.beams.requests] for one in held)
        self._first = capture(lambda: self._begin_with(hidden, scores))
        self.held = held

    def _begin_with(self, hidden: torch.Tensor, scores: torch.Tensor) -> None:
        """The layer after the roots [requests, ...], of their best next tokens; may be captured."""
        n, width = len(hidden), self.shape.beams.width
        logp, token = self._best(scores, self._table[: n * width : width])
        of_rows = self._hidden[: n * width].view(n, width, -1)
        of_rows.copy_(hidden.unsqueeze(1).expand_as(of_rows))
        self._all.token[:n].copy_(token)
        self._all.logp[:n].copy_(logp)
        self._number.zero_()
        self._keep(self._growth.first(self._all.logp, self._all.token))

    def _tell(self, stops: list[list[int]], least: list[float]) -> None:
        """Where paths end, if that is not what the device knows."""
        if (stops, least) == self._told:
            return
        self._told = stops, least
        filled = np.full(self._stops.shape, -1, dtype=np.int64)
        for number, of_request in enumerate(stops):
            filled[number, 0, : len(of_request)] = of_request
        bounds = np.full(self._least.shape, -np.inf)
        bounds[: len(least), 0] = least
        overwrite(self._stops, filled)
        overwrite(self._least, bounds)

    def next(self) -> Beams:
        """The layer after; its tensors are valid until the next one's."""
        assert self.graph is not None
        self.graph.replay()
        self.num_layers += 1
        return self.newest()

    def found(self) -> torch.Tensor:
        """float64 [3, requests, layers, width], tokens, parents and log-probabilities of all layers."""
        return self._found[: self.num_layers, :, : self._num_requests].permute(1, 2, 0, 3)

    def compute(self) -> None:
        """The next layer; captured."""
        rows, width, hidden = self._rows, self.shape.beams.width, self._hidden
        if width > 1:
            rows.see_from(self._all.parent)
            hidden = hidden.index_select(0, (self._all.parent + self._first_rows).flatten())
        rows.move_on()
        made = self._layer.forward(hidden, rows.tokens, rows.positions, rows.plan)
        logp, token = self._best(self._layer.logits(made), self._table)
        self._hidden.copy_(made)
        self._keep(self._growth.next(self._all, logp, token))

    def _best(self, scores: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best next tokens of rows of logits, as many as beams are wide, ranked as `table` says.

        As `EagleDrafts` does beside layers that are not captured.
        """
        width, token_of = self.shape.beams.width, self._layer.weights.token_of
        if not self.shape.is_sampled:
            logp, token = highest_log_probabilities(scores, width)
            return logp, token if token_of is None else token_of[token]
        if token_of is not None:
            whole = scores.new_full((len(scores), self._vocab_size), -torch.inf)
            scores = whole.index_copy_(1, token_of, scores)
        ranked = shape_rows(scores, table.contiguous(), perturbed=True, in_place=token_of is not None)
        return highest_log_probabilities(ranked, width)

    def _keep(self, newest: Beams) -> None:
        """The newest layer, where the next one finds it and among all that was found."""
        held = self._all
        held.token.copy_(newest.token)
        held.parent.copy_(newest.parent)
        held.logp.copy_(newest.logp)
        held.path_logp.copy_(newest.path_logp)
        held.open_logp.copy_(newest.open_logp)
        found = torch.stack((held.token.double(), held.parent.double(), held.logp.double()))
        self._found.index_copy_(0, self._number, found.unsqueeze(0))
        self._number.add_(1)
        if self.shape.is_sampled:
            self._table[:, POSITION].add_(1)

    def newest(self) -> Beams:
        """The latest layer, valid until the next one is there."""
        n, held = self._num_requests, self._all
        return Beams(held.token[:n], held.parent[:n], held.logp[:n], held.path_logp[:n], held.open_logp[:n])
