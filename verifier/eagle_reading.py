"""What EAGLE's layer reads of the target's forwards: at once where drafts follow, else many steps together.

Reading a few rows costs what reading the layer's weights costs. So while nobody is drafted for, rows that
were decoded are put off, with the hidden states they are to be read with, until somebody is, until there are
many, or until their request goes and leaves its prefix to others. Prompts are many rows, and read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from engine.devices import index_on
from engine.eagle import EagleLayer, FeatureRunner
from engine.runner import Segment
from verifier.eagle_reading_graphs import LastRows, ReadingGraphs
from verifier.proposing import Read

#: Rows put off, of all requests together: with more, all are read.
MOST_UNREAD = 256


@dataclass(slots=True, eq=False)
class _Unread:
    """Rows of one request that were put off, the oldest first, and the features of each part."""

    reads: list[Read] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(len(one.tokens) for one in self.reads)

    def goes_on_with(self, read: Read) -> bool:
        """Whether `read` begins where these end; else the request was prefilled anew since."""
        return bool(self.reads) and int(self.reads[-1].positions[-1]) + 1 == int(read.positions[0])


class EagleReading:
    """The layer's keys and values of every request, and what is still to be read.

    Attributes:
        num_unread: rows put off.
    """

    def __init__(self, layer: EagleLayer, runner: FeatureRunner, graphs: ReadingGraphs | None = None) -> None:
        """Of `layer` on the target of `runner`; `graphs` has captured reads."""
        self._layer, self._runner, self._graphs = layer, runner, graphs
        self._unread: dict[str, _Unread] = {}
        self.num_unread = 0

    def read(self, reads: Sequence[Read], held: torch.Tensor | None = None) -> tuple[list[Read], LastRows]:
        """Read rows of a forward, each request's after those of it that were put off.

        Args:
            reads: the rows.
            held: features of all rows of their forward; None if it is the latest.

        Returns:
            what was read of each request, and what the layer made of the last row of each.
        """
        features = self._features(reads, held)
        merged, parts = list(reads), [features]
        if self._unread:
            merged, parts = [], []
            for one, own in zip(reads, _split(features, reads), strict=True):
                before = self._taken(one.request_id)
                if not before.goes_on_with(one):
                    before = _Unread()
                merged.append(_joined([*before.reads, one]))
                parts += [*before.features, own]
        segments = _segments(merged)
        found = None if self._graphs is None else self._graphs.read(segments, parts)
        if found is None:
            ends = np.cumsum([len(one.tokens) for one in merged]) - 1
            made = self._forward(segments, parts)
            found = LastRows(made.index_select(0, index_on(ends, self._runner.device)), None)
        return merged, found

    def put_off(self, reads: Sequence[Read], held: torch.Tensor | None = None) -> None:
        """Read prompts' rows of a forward, and put the others off; arguments as of `read`."""
        prompts = [one for one in reads if one.is_prompt]
        if prompts:
            self.read(prompts, held)
        decoded = [one for one in reads if not one.is_prompt]
        if not decoded:
            return
        for one, own in zip(decoded, _split(self._features(decoded, held), decoded), strict=True):
            unread = self._unread.get(one.request_id)
            if unread is None or not unread.goes_on_with(one):
                self._taken(one.request_id)
                unread = self._unread[one.request_id] = _Unread()
                one = msgspec.structs.replace(one, past=one.past.copy())  # it is a view of what changes
            unread.reads.append(one)
            unread.features.append(own)
            self.num_unread += len(one.tokens)
        if self.num_unread > MOST_UNREAD:
            self._read_all()

    def release(self, request_id: str) -> None:
        """The request goes; its slots, which others may share, hold what they are to hold afterwards."""
        if request_id in self._unread:
            self._read_all()

    def forget_all(self) -> None:
        """Whatever was put off is not read any more."""
        self._unread.clear()
        self.num_unread = 0

    def _taken(self, request_id: str) -> _Unread:
        unread = self._unread.pop(request_id, None) or _Unread()
        self.num_unread -= unread.num_rows
        return unread

    def _read_all(self) -> None:
        every = [self._taken(request_id) for request_id in list(self._unread)]
        self._forward(
            _segments([_joined(unread.reads) for unread in every]),
            [part for unread in every for part in unread.features],
        )

    def _features(self, reads: Sequence[Read], held: torch.Tensor | None) -> torch.Tensor:
        """Of the rows of all of them."""
        rows = np.concatenate([one.rows for one in reads])
        if held is None:
            return self._runner.features(rows)
        if len(rows) == len(held):  # all of them, as of most steps: nothing is to be picked out
            return held
        return held.index_select(0, index_on(rows, held.device))

    def _forward(self, segments: Sequence[Segment], features: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the layer makes of all rows."""
        plan = self._layer.attention.plan(segments)
        tokens, positions = (
            index_on(np.concatenate(parts), self._runner.device)
            for parts in ([one.tokens for one in segments], [one.positions for one in segments])
        )
        hidden = self._layer.combined(torch.cat(list(features)))
        return self._layer.forward(hidden, tokens, positions, plan)


def _split(features: torch.Tensor, reads: Sequence[Read]) -> Sequence[torch.Tensor]:
    """Those of each."""
    return torch.split(features, [len(one.rows) for one in reads])


def _segments(reads: Sequence[Read]) -> list[Segment]:
    return [Segment(one.tokens, one.positions, one.slots, one.past) for one in reads]


def _joined(reads: Sequence[Read]) -> Read:
    """Rows of one request, one part after the other; `rows` means nothing where there are several."""
    if len(reads) == 1:
        return reads[0]
    return msgspec.structs.replace(
        reads[0],
        tokens=np.concatenate([one.tokens for one in reads]),
        positions=np.concatenate([one.positions for one in reads]),
        slots=np.concatenate([one.slots for one in reads]),
    )
