"""Captured forwards of EAGLE's layer over the layers of beams: one launch a layer, laid out once a draft.

Launched kernel by kernel, a layer takes the host longer than it takes a GPU to read its weights, and laying
the next one out as long again. So the host describes the first layer, and each captured forward moves the
description on (see `engine.moving_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from engine.captured_shapes import CapturedShapes, ShapeOf
from engine.capturing import captured
from engine.eagle import EagleLayer
from engine.moving_rows import BeamRows, BeamShape, MovingRows, can_move
from engine.padded_segments import power_of_two
from engine.triton_attention import TritonAttention
from engine.triton_sampling import described_rows
from verifier.eagle_beams import Beams, ends
from verifier.eagle_forwards import DraftSlots, Roots
from verifier.eagle_growing import MOST_STOPS, GrowingLayers, GrowingShape
from verifier.proposing import Asking

Captured = TypeVar("Captured")

#: Rows of a captured layer, over all requests.
MOST_ROWS = 128
#: Shapes captured, at most.
MOST_SHAPES = 32


class EagleGraphs:
    """The captured layers of an `EagleLayer` whose attention is in Triton, on a GPU.

    With tensor parallelism all ranks capture at the same calls.
    """

    def __init__(self, layer: EagleLayer, slots: DraftSlots, max_tokens: int, vocab_size: int) -> None:
        """For beams over `slots` of the layer's attention, after at most `max_tokens` of a sequence of the
        target, which has so many tokens."""
        assert isinstance(layer.attention, TritonAttention)
        self._layer, self._attention, self._slots = layer, layer.attention, slots
        self._max_tokens, self._vocab_size = max_tokens, vocab_size
        self._captured = CapturedShapes[BeamShape, CapturedLayer](MOST_SHAPES)
        self._growing = CapturedShapes[GrowingShape, GrowingLayers](MOST_SHAPES)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()
        # What layers of all shapes leave: each is read before the next is begun.
        self._scores = self._hidden = torch.empty(0, device=layer.attention.device)

    def forwards(self, roots: Roots) -> CapturedLayer | None:
        """`Forwards` from `roots` on; None if they are to be laid out one by one."""
        shape = BeamShape(power_of_two(len(roots.reads)), roots.width)
        beams = self._beams(roots)
        if shape.num_rows > MOST_ROWS or not can_move(beams):
            return None
        found = self._serving(self._captured, shape, partial(self._capture, shape, roots))
        return found if found is not None and found.begin(beams, roots.hidden) else None

    def growing(self, roots: Roots, asking: Sequence[Asking]) -> GrowingLayers | None:
        """The layers of beams, begun with the one after the roots; None if they are chosen one by one."""
        params, stops = [one.state.params for one in asking], ends(asking)
        is_sampled = not all(one.is_greedy for one in params)
        shape = GrowingShape(BeamShape(power_of_two(len(roots.reads)), roots.width), is_sampled)
        if shape.num_rows > MOST_ROWS or max(map(len, stops)) > MOST_STOPS:
            return None
        if any(one.adjusts_logits for one in params):
            return None
        beams = self._beams(roots)
        if not can_move(beams):
            return None
        found = self._serving(self._growing, shape, partial(self._capture_growing, shape, roots))
        if found is None:
            return None
        if roots.held is not None and found.held is not roots.held:
            self._capture_first(found, roots.held)
        least = [one.stop_token_logp for one in asking]
        sampling = None
        if found.shape.is_sampled:
            positions = [one.state.num_output + len(one.tokens) for one in asking]
            sampling = described_rows(params, positions, self._vocab_size)
        return found if found.begin(beams, roots, stops, least, sampling) else None

    @property
    def shapes(self) -> list[BeamShape | GrowingShape]:
        """Those that are replayed, in the order of their capture, and then those that grow by themselves."""
        return [*self._captured.shapes, *self._growing.shapes]

    def _serving(
        self, captured: CapturedShapes[ShapeOf, Captured], shape: ShapeOf, capture: Callable[[], Captured]
    ) -> Captured | None:
        """What serves a shape, captured now if that is due."""
        found = captured[shape]
        if found is None and captured.is_due(shape):
            try:
                found = capture()
                captured.keep(shape, found)
            except torch.cuda.OutOfMemoryError:
                captured.has_room = False
        return captured.serving(shape) if found is None else found

    def _beams(self, roots: Roots) -> list[BeamRows]:
        n, width = len(roots.reads), roots.width
        nothing = np.zeros(0, dtype=np.int32)
        slots = self._slots.of(n, (roots.depth - 1) * width)
        return [
            BeamRows(
                past=np.concatenate((read.past, read.slots)),
                above=nothing,
                slots=own,
                width=width,
                position=int(read.positions[-1]) + 1,
            )
            for own, read in zip(slots, roots.reads, strict=True)
        ]

    def _capture_growing(self, shape: GrowingShape, roots: Roots) -> GrowingLayers:
        made = GrowingLayers(
            self._layer,
            shape,
            max_tokens=self._max_tokens,
            vocab_size=self._vocab_size,
            spare=self._slots.spare,
            hidden=self._hidden_of(roots),
        )
        made.graph = captured(made.compute, self._pool, self._graphs)
        return made

    def _capture_first(self, growing: GrowingLayers, held: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Capture the layer after roots that are read by a graph, if there is memory for it."""
        if not self._growing.has_room or growing.shape.beams.requests > len(held[0]):
            return
        try:
            growing.capture_first(held, lambda compute: captured(compute, self._pool, self._graphs))
        except torch.cuda.OutOfMemoryError:
            self._growing.has_room = False

    def _hidden_of(self, roots: Roots) -> torch.Tensor:
        if not len(self._hidden):
            self._hidden = roots.hidden.new_zeros(MOST_ROWS, roots.hidden.shape[1])
        return self._hidden

    def _capture(self, shape: BeamShape, roots: Roots) -> CapturedLayer:
        hidden = self._hidden_of(roots)
        if not len(self._scores):
            num_scores = self._layer.logits(roots.hidden[:1]).shape[1]
            self._scores = torch.zeros(MOST_ROWS, num_scores, device=roots.hidden.device)
        rows = MovingRows(self._attention, shape, max_tokens=self._max_tokens, spare=self._slots.spare)
        made = CapturedLayer(self._layer, rows, hidden, self._scores)
        made.graph = captured(made.compute, self._pool, self._graphs)
        return made


class CapturedLayer:
    """`Forwards` of beams of one shape.

    Attributes:
        graph: of `compute`, once captured.
    """

    def __init__(
        self,
        layer: EagleLayer,
        rows: MovingRows,
        hidden: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Of beams of nobody, until `begin`; `hidden` and `scores` [MOST_ROWS, ...] are where results go."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self._layer, self._rows = layer, rows
        requests, width = rows.shape
        device, num_rows = scores.device, rows.shape.num_rows
        self._hidden, self._scores = hidden[:num_rows], scores[:num_rows]
        self._parents = torch.zeros(requests, width, dtype=torch.int64, device=device)
        self._first_rows = torch.arange(requests, device=device).unsqueeze(1) * width

    def begin(self, beams: Sequence[BeamRows], roots: torch.Tensor) -> bool:
        """Describe the first layer after `roots` [beams, hidden]; False if the beams find no room."""
        if not self._rows.holds(beams):
            return False
        self._rows.begin(beams)
        n, width = len(beams), self._rows.shape.width
        hidden = self._hidden[: n * width].view(n, width, -1)
        hidden.copy_(roots.unsqueeze(1).expand_as(hidden))
        return True

    def next(self, beams: Beams) -> torch.Tensor:
        """See `Forwards`."""
        assert self.graph is not None
        n, width = beams.token.shape
        self._rows.tokens[: n * width].copy_(beams.token.flatten())
        if width > 1:
            self._parents[:n].copy_(beams.parent)
        self.graph.replay()
        return self._scores[: n * width]

    def compute(self) -> None:
        """The next layer."""
        rows, width, hidden = self._rows, self._rows.shape.width, self._hidden
        if width > 1:
            rows.see_from(self._parents)
            hidden = hidden.index_select(0, (self._parents + self._first_rows).flatten())
        rows.move_on()
        made = self._layer.forward(hidden, rows.tokens, rows.positions, rows.plan)
        self._scores.copy_(self._layer.logits(made))
        self._hidden.copy_(made)
