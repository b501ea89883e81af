"""Forwards of EAGLE's layer over the layers of a call's beams, laid out by the host one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.device_rows import DeviceRows
from engine.devices import index_on
from engine.eagle import EagleLayer
from engine.runner import Segment
from verifier.eagle_beams import Beams
from verifier.proposing import Read

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Roots:
    """What the beams of a call grow from.

    Attributes:
        reads: of each request, whose last row its beam follows.
        hidden: [requests, hidden], what the layer made of those rows.
        scores: float32 [requests, drafted tokens], what comes after.
        held: as of `LastRows`; None if these rows are not the first ones.
        width: of the beams.
        depth: layers that they have at most.
        last_position: that a sequence may have.
    """

    reads: Sequence[Read]
    hidden: torch.Tensor
    scores: torch.Tensor
    held: tuple[torch.Tensor, torch.Tensor] | None
    width: int
    depth: int
    last_position: int

    @property
    def num_committed(self) -> list[int]:
        """Keys of each request that all rows of its beam see."""
        return [len(read.past) + len(read.slots) for read in self.reads]


class Forwards(Protocol):
    """Forwards of the layers of one call's beams, in order."""

    def next(self, beams: Beams) -> torch.Tensor:
        """float32 [requests * width, drafted tokens], what comes after the tokens of the newest layer; valid
        until the next one's."""
        ...


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """Slots for the tokens of beams; the last is nobody's.

    Attributes:
        first: of them.
        number: how many there are.
    """

    first: int
    number: int

    @property
    def spare(self) -> int:
        """That no row ever sees."""
        return self.first + self.number - 1

    def most_layers(self, requests: int, width: int) -> int:
        """Layers of beams that find room."""
        return (self.number - 1) // (requests * width)

    def of(self, requests: int, rows: int) -> Int32:
        """int32 [requests, rows], those of the first rows of each of so many requests' beams."""
        size = (self.number - 1) // requests
        firsts = self.first + size * np.arange(requests, dtype=np.int32)
        return np.add.outer(firsts, np.arange(rows, dtype=np.int32)).astype(np.int32)


class LaidOutForwards:
    """`Forwards` that are planned layer by layer."""

    def __init__(self, layer: EagleLayer, roots: Roots, slots: DraftSlots) -> None:
        """From `roots` on, over `slots` of the layer's attention."""
        self._layer, self._roots, self._slots = layer, roots, slots
        width, device = roots.width, roots.hidden.device
        # The layer may overwrite what it reads.
        self._hidden = roots.hidden.repeat_interleave(width, 0) if width > 1 else roots.hidden.clone()
        self._first_rows = torch.arange(len(roots.reads), device=device).unsqueeze(1) * width
        self._committed: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._below = 0

    def next(self, beams: Beams) -> torch.Tensor:
        """See `Forwards`."""
        self._below += 1
        attention, segments, tokens = self._layer.attention, self._segments(), beams.token.flatten()
        if self._roots.width == 1:
            plan = attention.plan(segments)
        else:
            if self._committed is None:
                self._committed = index_on(np.array(self._roots.num_committed), tokens.device)
            self._seen = self._see(beams)
            plan = attention.plan_rows(segments, DeviceRows(tokens, self._committed, self._seen))
            if self._below > 1:
                self._hidden = self._hidden.index_select(0, (beams.parent + self._first_rows).flatten())
        positions = index_on(np.concatenate([segment.positions for segment in segments]), tokens.device)
        self._hidden = self._layer.forward(self._hidden, tokens, positions, plan)
        return self._layer.logits(self._hidden)

    def _segments(self) -> list[Segment]:
        roots, width, below = self._roots, self._roots.width, self._below
        segments = []
        slots = self._slots.of(len(roots.reads), below * width)
        for drafted, read in zip(slots, roots.reads, strict=True):
            position = min(int(read.positions[-1]) + below, roots.last_position)
            segments.append(
                Segment(
                    tokens=np.zeros(width, dtype=np.int32),
                    positions=np.full(width, position, dtype=np.int32),
                    slots=drafted[-width:],
                    past=np.concatenate((read.past, read.slots, drafted[:-width])),
                )
            )
        return segments

    def _see(self, beams: Beams) -> torch.Tensor:
        """bool [requests, width, columns], which drafted tokens each of the layer's sees."""
        before, (n, width) = self._seen, beams.token.shape
        own = torch.eye(width, dtype=torch.bool, device=beams.token.device).expand(n, width, width)
        if before is None:
            return own
        above = before.gather(1, beams.parent.unsqueeze(2).expand(n, width, before.shape[2]))
        return torch.cat((above, own), 2)
