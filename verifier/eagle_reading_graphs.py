"""Captured forwards of EAGLE's layer over rows of the target's forward, with what its beams grow from.

Decisions have come to the host when it is known what is to be read, and the device waits for it: launched
kernel by kernel, a read takes the host several times as long as it takes a GPU to read the layer's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.captured_shapes import CapturedShapes
from engine.capturing import captured
from engine.devices import overwrite
from engine.eagle import EagleLayer
from engine.padded_segments import MOST_PROMPT_ROWS, Shape, pad_rows, shape_of
from engine.rectangles import key_counts
from engine.runner import Segment
from engine.static_attention import MOST_READS, TritonStatic
from engine.triton_attention import TritonAttention

#: Rows and requests of a captured read; larger ones have enough work per launch.
MOST_ROWS, MOST_REQUESTS = MOST_PROMPT_ROWS, 64
#: Shapes captured, at most.
MOST_SHAPES = 128


class LastRows(NamedTuple):
    """Of the last row of each request read; where they are captured, until the next read.

    Attributes:
        hidden: [requests, hidden], what the layer made of it.
        scores: float32 [requests, drafted tokens], what comes after; None if not computed yet.
        held: the tensors that these are the first rows of, where they are captured: always the same.
    """

    hidden: torch.Tensor
    scores: torch.Tensor | None
    held: tuple[torch.Tensor, torch.Tensor] | None = None


class _Static:
    """The tensors of one shape, and its graph once captured."""

    def __init__(self, attention: TritonAttention, shape: Shape, like: torch.Tensor, max_tokens: int) -> None:
        """Of a shape; `like` has features, and sequences have at most `max_tokens`."""
        rows, device = shape.num_rows, attention.device
        # All that the host says of rows and requests, in one transfer: tokens, positions, slots to write to,
        # and the last row of each request.
        self.numbers = torch.zeros(3 * rows + shape.requests, dtype=torch.int64, device=device)
        self.tokens, self.positions, write = self.numbers[: 3 * rows].view(3, rows).unbind(0)
        self.last = self.numbers[3 * rows :]
        self.features = like.new_zeros(rows, like.shape[1])
        self.shape = shape
        self.attention = TritonStatic(attention, shape, write, max_tokens)
        self.graph: torch.cuda.CUDAGraph | None = None


class ReadingGraphs:
    """The captured reads of an `EagleLayer` whose attention is in Triton, on a GPU.

    With tensor parallelism all ranks capture at the same calls.
    """

    def __init__(self, layer: EagleLayer, spare: int, max_tokens: int) -> None:
        """None yet; `spare` is a slot that nobody sees, and sequences have at most `max_tokens`."""
        assert isinstance(layer.attention, TritonAttention)
        self._layer, self._attention = layer, layer.attention
        self._spare, self._max_tokens = spare, max_tokens
        self._captured = CapturedShapes[Shape, _Static](MOST_SHAPES)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()
        # What reads of all shapes leave: each is read before the next is begun.
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def shapes(self) -> list[Shape]:
        """Those that are replayed, in the order of their capture."""
        return self._captured.shapes

    def read(
        self, segments: Sequence[Segment], features: Sequence[torch.Tensor], *, at_once: bool = False
    ) -> LastRows | None:
        """Read rows of some requests; None if these are to be read the ordinary way.

        Args:
            segments: rows of each request, with the tokens after them.
            features: of all those rows, in parts.
            at_once: capture their shape now, if there is room.
        """
        try:
            static = self._static_for(segments, features, at_once=at_once)
            if static is None:
                return None
            self._fill(static, segments, features)
            if static.graph is None:
                static.graph = captured(lambda: self._compute(static), self._pool, self._graphs)
                self._captured.keep(static.shape, static)
        except torch.cuda.OutOfMemoryError:
            self._captured.has_room = False
            return None
        static.graph.replay()
        assert self._held is not None
        n, (hidden, scores) = len(segments), self._held
        return LastRows(hidden[:n], scores[:n], self._held)

    def _fill(self, static: _Static, segments: Sequence[Segment], features: Sequence[torch.Tensor]) -> None:
        """Describe the rows to a shape that holds them."""
        padded = pad_rows(segments, static.shape, self._spare)
        rows, n = static.shape.num_rows, len(segments)
        numbers = np.zeros(len(static.numbers), dtype=np.int64)
        numbers[: 3 * rows].reshape(3, rows)[:] = padded.tokens, padded.positions, padded.write
        numbers[3 * rows : 3 * rows + n] = np.cumsum([len(segment.slots) for segment in segments]) - 1
        overwrite(static.numbers, numbers)
        torch.cat(list(features), out=static.features[: len(padded.batch_rows)])
        static.attention.fill(segments)

    def _static_for(
        self, segments: Sequence[Segment], features: Sequence[torch.Tensor], *, at_once: bool
    ) -> _Static | None:
        """Tensors of a shape that holds the rows."""
        most_keys = MOST_READS * self._attention.num_slots
        if sum(key_counts(segments)) > most_keys:
            return None
        shape = shape_of(segments, with_keys=False, is_rectangle=False)
        if shape.num_rows > MOST_ROWS or shape.requests > MOST_REQUESTS:
            return None
        found = self._captured[shape]
        if found is not None:
            return found
        if not self._captured.is_due(shape, at_once=at_once):
            return self._captured.serving(shape)
        if self._held is None:
            num_scores = self._layer.logits(self._layer.combined(features[0][:1])).shape[1]
            width, device = self._layer.weights.hidden_size, self._attention.device
            self._held = (
                torch.zeros(MOST_REQUESTS, width, dtype=features[0].dtype, device=device),
                torch.zeros(MOST_REQUESTS, num_scores, device=device),
            )
        return _Static(self._attention, shape, features[0], self._max_tokens)

    def _compute(self, static: _Static) -> None:
        layer, plan = self._layer, static.attention.plan
        made = layer.forward(layer.combined(static.features), static.tokens, static.positions, plan)
        last = made.index_select(0, static.last)
        assert self._held is not None
        hidden, scores = self._held
        hidden[: len(last)].copy_(last)
        scores[: len(last)].copy_(layer.logits(last))
