"""Captured forwards of EAGLE's layer over the layers of beams: one launch a layer, laid out once a draft.

Launched kernel by kernel, a layer takes the host longer than it takes a GPU to read its weights, and laying
the next one out as long again. What changes from one layer to the next is known beforehand, but for the
tokens and their parents: slots, positions and how many keys there are move on by the beam's width. So the
host describes the first layer, and each captured forward moves the description on to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.capturing import captured
from engine.devices import overwrite
from engine.eagle import EagleLayer
from engine.padded_segments import Shape, power_of_two
from engine.runner import KeyTokens
from engine.static_attention import most_keys
from engine.triton_attention import FIELDS, SegmentTable, TritonAttention, TritonPlan
from verifier.eagle_beams import Beams
from verifier.eagle_forwards import DraftSlots, Roots

#: Rows of a captured layer, over all requests, and drafted tokens that a row of a tree may see.
MOST_ROWS, MOST_COLUMNS = 128, 64
#: Shapes captured, at most, each when it comes for the so manieth time.
MOST_SHAPES, CAPTURE_AT = 32, 2
# Columns of `SegmentTable.segments`.
_ROW, _ROWS, _KEY, _KEYS, _COMMITTED, _SEEN, _COLUMNS = range(FIELDS)


class BeamShape(NamedTuple):
    """Of a captured layer: `requests`, with those of nobody, and the `width` of their beams."""

    requests: int
    width: int

    @property
    def num_rows(self) -> int:
        """Of a layer."""
        return self.requests * self.width


class EagleGraphs:
    """The captured layers of an `EagleLayer` whose attention is in Triton, on a GPU.

    With tensor parallelism all ranks capture at the same calls.
    """

    def __init__(self, layer: EagleLayer, slots: DraftSlots, max_tokens: int) -> None:
        """For beams over `slots` of the layer's attention, after at most `max_tokens` of a sequence."""
        assert isinstance(layer.attention, TritonAttention)
        self._layer, self._attention, self._slots = layer, layer.attention, slots
        self._max_tokens = max_tokens
        self._met: dict[BeamShape, int] = {}
        self._layers: dict[BeamShape, CapturedLayer] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._has_room = True
        # What layers of all shapes leave: each is read before the next is begun.
        self._scores = self._hidden = torch.empty(0, device=layer.attention.device)

    def forwards(self, roots: Roots) -> CapturedLayer | None:
        """`Forwards` from `roots` on; None if they are to be laid out one by one."""
        shape = BeamShape(power_of_two(len(roots.reads)), roots.width)
        is_too_large = shape.num_rows > MOST_ROWS or (roots.depth - 1) * roots.width > MOST_COLUMNS
        if is_too_large or self._num_keys(roots) > self._most_keys(shape):
            return None
        found = self._layers.get(shape)
        if found is None:
            self._met[shape] = self._met.get(shape, 0) + 1
            if self._met[shape] < CAPTURE_AT or len(self._layers) == MOST_SHAPES or not self._has_room:
                return None
            try:
                found = self._captured(shape, roots)
            except torch.cuda.OutOfMemoryError:
                self._has_room = False
                return None
            self._layers[shape] = found
        found.begin(roots)
        return found

    def _num_keys(self, roots: Roots) -> int:
        return sum(roots.num_committed) + len(roots.reads) * (roots.depth - 1) * roots.width

    def _most_keys(self, shape: BeamShape) -> int:
        rows = Shape(shape.requests, shape.width, 0)
        return most_keys(rows, self._max_tokens, self._attention.num_slots)

    def _captured(self, shape: BeamShape, roots: Roots) -> CapturedLayer:
        if not len(self._scores):
            self._hidden = roots.hidden.new_zeros(MOST_ROWS, roots.hidden.shape[1])
            num_scores = self._layer.logits(roots.hidden[:1]).shape[1]
            self._scores = torch.zeros(MOST_ROWS, num_scores, device=roots.hidden.device)
        integers = self._attention.shared_integers(shape.requests * FIELDS + self._most_keys(shape))
        made = CapturedLayer(
            self._layer, self._slots, shape, self._max_tokens, integers, self._hidden, self._scores
        )
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
        slots: DraftSlots,
        shape: BeamShape,
        max_tokens: int,
        integers: torch.Tensor,
        hidden: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Of beams of nobody, until `begin`; `hidden` and `scores` [MOST_ROWS, ...] are where results go."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self._layer, self._slots, self._shape = layer, slots, shape
        requests, width, rows, device = *shape, shape.num_rows, scores.device
        self._hidden, self._scores = hidden[:rows], scores[:rows]
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._parents = torch.zeros(requests, width, dtype=torch.int64, device=device)
        self._first_rows = torch.arange(requests, device=device).unsqueeze(1) * width
        self._last_position = max_tokens - 1
        # All that the host says of rows: positions, slots and by how much those move on, and of a tree's rows
        # their own columns.
        self._numbers = torch.zeros(3 * rows + width, dtype=torch.int64, device=device)
        self._positions, self._write, self._steps = self._numbers[: 3 * rows].view(3, rows).unbind(0)
        self._own = self._numbers[3 * rows :]
        self._write.fill_(slots.spare)
        columns = MOST_COLUMNS if width > 1 else 1
        self._seen = torch.zeros(requests, width, columns, dtype=torch.uint8, device=device)
        self._integers = integers
        num_fields = requests * FIELDS
        self._plan = TritonPlan(
            num_rows=rows,
            write=self._write,
            groups=[],
            key_tokens=KeyTokens(0, 0),
            table=SegmentTable(integers[:num_fields], integers[num_fields:], self._seen.view(-1)),
            most_rows=width,
            most_keys=max_tokens,
        )
        self._fields = integers[:num_fields].view(requests, FIELDS)
        self._fields.zero_()
        self._num_requests = 0

    def begin(self, roots: Roots) -> None:
        """Describe the first layer of the beams of `roots`, which the shape holds."""
        (requests, width), n, slots = self._shape, len(roots.reads), self._slots
        self._num_requests = n
        numbers = np.zeros(len(self._numbers), dtype=np.int64)
        positions, write, steps = numbers[: 3 * requests * width].reshape(3, requests, width)
        write[:] = slots.spare
        numbers[-width:] = np.arange(width)
        table = np.zeros((requests, FIELDS), dtype=np.int32)
        table[:, _SEEN] = -1
        keys = []
        for number, read in enumerate(roots.reads):
            drafted = slots.of(number, n, (roots.depth - 1) * width)
            positions[number] = min(int(read.positions[-1]) + 1, self._last_position)
            write[number], steps[number] = drafted[:width], width
            keys += [read.past, read.slots, drafted]
        table[:n, _ROW] = np.arange(n) * width
        table[:n, _ROWS] = width
        table[:n, _COMMITTED] = roots.num_committed
        table[1:n, _KEY] = np.cumsum(table[:n, _COMMITTED] + (roots.depth - 1) * width)[:-1]
        table[:n, _KEYS] = table[:n, _COMMITTED] + width
        if width > 1:
            table[:n, _COLUMNS] = MOST_COLUMNS
            table[:n, _SEEN] = np.arange(n) * (width * MOST_COLUMNS)
            self._seen.zero_()
        integers = np.concatenate([table.reshape(-1), *keys]).astype(np.int32, copy=False)
        overwrite(self._numbers, numbers)
        overwrite(self._integers[: len(integers)], integers)
        hidden = self._hidden[: n * width].view(n, width, -1)
        hidden.copy_(roots.hidden.unsqueeze(1).expand_as(hidden))

    def next(self, beams: Beams) -> torch.Tensor:
        """See `Forwards`."""
        assert self.graph is not None
        n, width = beams.token.shape
        self._tokens[: n * width].copy_(beams.token.flatten())
        if width > 1:
            self._parents[:n].copy_(beams.parent)
        self.graph.replay()
        return self._scores[: n * width]

    def compute(self) -> None:
        """One layer, and the description of the next."""
        width, hidden = self._shape.width, self._hidden
        if width > 1:
            parents = self._parents.unsqueeze(2).expand_as(self._seen)
            own = self._own.view(1, width, 1).expand(self._shape.requests, width, 1)
            self._seen.copy_(self._seen.gather(1, parents).scatter_(2, own, 1))
            hidden = hidden.index_select(0, (self._parents + self._first_rows).flatten())
        made = self._layer.forward(hidden, self._tokens, self._positions, self._plan)
        self._scores.copy_(self._layer.logits(made))
        self._hidden.copy_(made)
        self._positions.add_(1).clamp_(max=self._last_position)
        self._write.add_(self._steps)
        self._fields[:, _KEYS].add_(width)
        if width == 1:
            self._fields[:, _COMMITTED].add_(1)
        else:
            self._own.add_(width).clamp_(max=MOST_COLUMNS - 1)
