"""Rows of beams that a captured forward moves on from layer to layer: laid out by the host once a draft.

What changes from one layer of a beam to the next is known beforehand, but for the tokens and their parents,
which the device chooses: slots, positions, and how many keys there are. So the host describes the first
layer, with the slots of all, and each captured layer begins with moving the description on to its own rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engine.devices import overwrite, staging
from engine.padded_segments import MOST_ROWS_PADDED, Shape, power_of_two
from engine.runner import KeyTokens
from engine.segment_table import FIELDS, SegmentTable
from engine.static_attention import most_keys
from engine.triton_attention import TritonAttention, TritonPlan

Int32 = NDArray[np.int32]

#: Layers of a beam, and keys of which its rows do not all see the same, at most.
MOST_LAYERS, MOST_COLUMNS = 64, 256
# Columns of `SegmentTable.segments`.
_ROW, _ROWS, _KEY, _KEYS, _COMMITTED, _SEEN, _COLUMNS = range(FIELDS)


class BeamShape(NamedTuple):
    """Of layers: `requests`, with those of nobody, and rows of each, of which not all need be somebody's."""

    requests: int
    width: int

    @property
    def num_rows(self) -> int:
        """Of a layer."""
        return self.requests * self.width

    def serves(self, other: Any) -> bool:
        """Whether beams of another shape may be computed in this one: as wide, and not many more rows."""
        assert isinstance(other, BeamShape)
        is_near = self.num_rows <= other.num_rows + MOST_ROWS_PADDED
        return self.width == other.width and self.requests >= other.requests and is_near


class BeamRows(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One request's rows, over all layers of its beam.

    Attributes:
        past: int32, slots of the keys that all rows see.
        above: int32, slots of the keys between those and the first layer's, which some rows see.
        slots: int32 [layers * width], of the rows, layer by layer.
        width: of each layer.
        position: of the first layer.
        seen: bool [width, len(above) + width], which keys from `above` on the rows of the first layer see;
            None where the device says it.
    """

    past: Int32
    above: Int32
    slots: Int32
    width: int
    position: int
    seen: NDArray[np.bool_] | None = None

    @property
    def num_layers(self) -> int:
        """That have slots."""
        return len(self.slots) // self.width


class MovingRows:
    """What the forwards of the layers of beams of one shape are given, in tensors that stay where they are.

    Rows of nobody, those of requests of nobody, beyond a beam's width and of layers behind a request's last,
    write to a slot that nobody sees. Requests of nobody see no keys, others' all that are committed.

    Attributes:
        shape: of a layer.
        tokens: int64 [rows], to be chosen by the device or the host.
        positions: int64 [rows].
        widths: int64 [requests], rows that are somebody's.
        own_column: int64 [requests], of `seen`, the first that belongs to layer 0.
        layer: int64 [requests], number of the next layer.
        seen: uint8 [requests, width, MOST_COLUMNS], which keys behind `BeamRows.past` each row sees: to be
            kept by whoever chooses parents. Not looked at where beams are chains.
        plan: what the rows attend to.
    """

    def __init__(
        self,
        attention: TritonAttention,
        shape: BeamShape,
        *,
        max_tokens: int,
        spare: int,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """Of nobody, until `begin`.

        Args:
            attention: of the forwards.
            shape: of the layers.
            max_tokens: of a sequence, at most.
            spare: a slot that no row ever sees.
            tokens: int64 [rows], where they are; None for a new one.
        """
        requests, rows, device = shape.requests, shape.num_rows, attention.device
        self.shape = shape
        self._spare = spare
        self._last_position = max_tokens - 1
        self._kernels: Any = importlib.import_module("engine.moving_kernels")
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device) if tokens is None else tokens
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        write = torch.full((rows,), spare, dtype=torch.int64, device=device)
        # All that the host says of the beams, in one transfer as far as there are layers.
        self._numbers = torch.zeros(4 * requests + MOST_LAYERS * rows, dtype=torch.int64, device=device)
        self._first_position, self.widths, self.own_column, self.layer = (
            self._numbers[: 4 * requests].view(4, requests).unbind(0)
        )
        self._layer_slots = self._numbers[4 * requests :]
        self._layer_slots.fill_(spare)
        self.seen = torch.zeros(requests, shape.width, MOST_COLUMNS, dtype=torch.uint8, device=device)
        self._column = torch.arange(shape.width, device=device)
        self._num_fields = requests * FIELDS
        self._most_keys = most_keys(Shape(requests, shape.width, 0), max_tokens, attention.num_slots)
        self._integers = attention.shared_integers(self._num_fields + self._most_keys, "layers")
        overwrite(self._integers[: self._num_fields], self._of_nobody())
        self.plan = TritonPlan(
            num_rows=rows,
            write=write,
            groups=[],
            key_tokens=KeyTokens(0, 0),
            table=SegmentTable(
                self._integers[: self._num_fields], self._integers[self._num_fields :], self.seen.view(-1)
            ),
            most_rows=shape.width,
            most_keys=max_tokens,
            ends_with_rows=shape.width == 1,  # rows of nobody are no keys
        )

    def holds(self, beams: Sequence[BeamRows]) -> bool:
        """Whether the beams find room."""
        layers = max(beam.num_layers for beam in beams)
        is_wide_enough = all(beam.width <= self.shape.width for beam in beams)
        has_keys = sum(len(beam.past) + _columns(beam, layers) for beam in beams) <= self._most_keys
        return len(beams) <= self.shape.requests and is_wide_enough and has_keys and can_move(beams)

    def begin(self, beams: Sequence[BeamRows]) -> None:
        """Describe what comes before the first layer of some beams, which find room."""
        (requests, width), layers = self.shape, max(beam.num_layers for beam in beams)
        numbers = np.zeros(4 * requests + layers * requests * width, dtype=np.int64)
        of_beams = numbers[: 4 * requests].reshape(4, requests)
        of_beams[:3, : len(beams)] = (
            [beam.position for beam in beams],
            [beam.width for beam in beams],
            [len(beam.above) for beam in beams],
        )
        self._lay_out(beams, numbers[4 * requests :].reshape(layers, requests, width))
        lines: list[tuple[int, ...]] = []
        keys: list[Int32] = []
        first_key = 0
        for number, beam in enumerate(beams):
            committed, above = len(beam.past), len(beam.above)
            keys += (beam.past, beam.above, beam.slots)
            columns = above + layers * beam.width
            missing = columns - above - len(beam.slots)
            if missing:
                keys.append(np.full(missing, self._spare, dtype=np.int32))
            first_seen = -1 if width == 1 else number * width * MOST_COLUMNS
            # Keys move on before each layer, and with them those that all rows of a chain see.
            num_keys = committed + above
            lines.append((number * width, width, first_key, num_keys, committed, first_seen, MOST_COLUMNS))
            first_key += committed + columns
        table = self._of_nobody()
        table[: len(beams)] = lines
        overwrite(self._numbers[: len(numbers)], numbers)
        staged = staging(self._num_fields + first_key, torch.int32, self._integers.device)
        values = staged.numpy()
        values[: self._num_fields] = table.reshape(-1)
        np.concatenate(keys, out=values[self._num_fields :])
        self._integers[: len(values)].copy_(staged, non_blocking=True)
        if width > 1:
            self._begin_to_see(beams)

    def _lay_out(self, beams: Sequence[BeamRows], layer_slots: NDArray[np.int64]) -> None:
        """Write the beams' slots to int64 [layers, requests, width]; rows of nobody get the spare one."""
        layers, _, width = layer_slots.shape
        layer_slots[:] = self._spare
        if all(len(beam.slots) == layers * width for beam in beams):
            slots = np.concatenate([beam.slots for beam in beams]).reshape(len(beams), layers, width)
            layer_slots[:, : len(beams)] = slots.transpose(1, 0, 2)
            return
        for number, beam in enumerate(beams):
            own = beam.slots.reshape(-1, beam.width)
            layer_slots[: len(own), number, : beam.width] = own

    def _of_nobody(self) -> Int32:
        """A table of beams whose rows see nothing: attention leaves zeros for them, not what memory held."""
        requests, width = self.shape
        table = np.zeros((requests, FIELDS), dtype=np.int32)
        table[:, _ROW], table[:, _ROWS] = np.arange(requests) * width, width
        table[:, _SEEN] = -1
        return table

    def _begin_to_see(self, beams: Sequence[BeamRows]) -> None:
        if all(beam.seen is None for beam in beams):
            self.seen.zero_()
            return
        seen = np.zeros(self.seen.shape, dtype=np.uint8)
        for lines, beam in zip(seen, beams, strict=False):
            if beam.seen is not None:
                rows, columns = beam.seen.shape
                lines[:rows, :columns] = beam.seen
        overwrite(self.seen, seen)

    def see_from(self, parents: torch.Tensor) -> None:
        """Have each row of the next layer see what its parent does, and itself; may be captured.

        Args:
            parents: int64 [requests, width], rows of the layer before.
        """
        first = (self.own_column + self.layer * self.shape.width).unsqueeze(1)
        own = (first + self._column).clamp_(max=MOST_COLUMNS - 1).unsqueeze(2)
        above = parents.unsqueeze(2).expand_as(self.seen)
        self.seen.copy_(self.seen.gather(1, above).scatter_(2, own, 1))

    def move_on(self) -> None:
        """Have the next layer's positions, slots and keys; may be captured."""
        requests, width = self.shape
        self._kernels.move_on[(requests,)](
            self.plan.table.segments,
            self._first_position,
            self.widths,
            self.layer,
            self._layer_slots,
            self.positions,
            self.plan.write,
            width,
            MOST_LAYERS,
            self._last_position,
            WIDTH=power_of_two(width),
            num_warps=1,
        )


def can_move(beams: Sequence[BeamRows]) -> bool:
    """Whether beams find room in any shape."""
    layers = max(beam.num_layers for beam in beams)
    is_chains = all(beam.width == 1 for beam in beams)
    has_columns = is_chains or all(_columns(beam, layers) <= MOST_COLUMNS for beam in beams)
    return layers <= MOST_LAYERS and has_columns


def _columns(beam: BeamRows, layers: int) -> int:
    """Keys behind those that all its rows see, had it so many layers."""
    return len(beam.above) + layers * beam.width
