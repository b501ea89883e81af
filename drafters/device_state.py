"""The layers of several requests' beams on the device, and what each layer's forward is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from drafters.device_beam import DeviceBeams, Layer
from drafters.device_growth import Growth
from drafters.next_tokens import OnDevice
from engine.device_rows import DeviceRows
from engine.devices import to_device


class DeviceState:
    """What the layers of several requests share on the device.

    Attributes:
        beams: how they grow.
        width: rows per request; those beyond its own width are never forwarded.
    """

    def __init__(self, growths: Sequence[Growth], device: torch.device) -> None:
        self.width = max(growth.width for growth in growths)
        self.beams = DeviceBeams([growth.job.beam for growth in growths], device)
        self._growths = growths
        self._device = device
        num_keys = [len(growth.job.held.tokens) for growth in growths]
        self._committed = to_device(torch.tensor(num_keys), device)
        widths = [growth.width for growth in growths]
        self._rows_before = [0, *np.cumsum(widths).tolist()]
        real = np.arange(self.width) < np.array(widths)[:, None]
        self._flat = to_device(torch.from_numpy(np.flatnonzero(real)), device)
        self._seen: torch.Tensor | None = None
        if self.width > 1:
            ends = [len(growth.above) + growth.num_layers * growth.width for growth in growths]
            seen = np.zeros((len(growths), self.width, max(ends)), dtype=np.bool_)
            for lines, growth in zip(seen, growths, strict=True):
                column = {node: i for i, node in enumerate(growth.above)}
                for line, (node, _) in zip(lines, growth.frontier, strict=False):
                    line[[column[above] for above in growth.job.tree.above(node)]] = True
            self._seen = to_device(torch.from_numpy(seen), device)
            first = np.array([[len(growth.above)] for growth in growths]) + np.arange(self.width)
            self._own_column = to_device(torch.from_numpy(first), device)
            self._step = to_device(torch.tensor(widths), device).unsqueeze(1)

    def first_layer(self) -> Layer:
        """What the host knows of it."""
        shape = (len(self._growths), self.width)
        token, logp = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        is_open = np.zeros(shape, dtype=np.bool_)
        for index, growth in enumerate(self._growths):
            for row, (node, value) in enumerate(growth.frontier):
                token[index, row], logp[index, row] = growth.job.tree.token[node], value
                is_open[index, row] = True
        tokens, logps, open_rows = (
            to_device(torch.from_numpy(a), self._device) for a in (token, logp, is_open)
        )
        return Layer(tokens, torch.zeros_like(tokens), logps, open_rows)

    def roots(self, numbers: Iterable[int]) -> Layer:
        """A layer of nothing but the roots of some requests, each in its first row."""
        is_open = np.zeros((len(self._growths), self.width), dtype=np.bool_)
        is_open[list(numbers), 0] = True
        rows = to_device(torch.from_numpy(is_open), self._device)
        zeros = torch.zeros(rows.shape, dtype=torch.int64, device=self._device)
        return Layer(zeros, zeros, zeros.double(), rows)

    def nothing(self, like: OnDevice, num_beams: int | None = None) -> OnDevice:
        """Next tokens of all rows of the first beams, none of them possible."""
        num_rows = (len(self._growths) if num_beams is None else num_beams) * self.width
        shape = (num_rows, like.values.shape[1])
        return OnDevice(like.values.new_full(shape, -torch.inf), like.tokens.new_zeros(shape))

    def grow(self, layer: Layer, best: OnDevice, active: int) -> Layer:
        """The next layer of the first `active` requests, from the best next tokens of the rows forwarded."""
        spread, num_rows = self.nothing(best, active), self._rows_before[active]
        flat = self._flat[:num_rows]
        spread.values.index_copy_(0, flat, best.values[:num_rows])
        spread.tokens.index_copy_(0, flat, best.tokens[:num_rows])
        grown = self.beams.grow(layer.first(active), spread)
        if self._seen is not None:
            parent = grown.parent.unsqueeze(2).expand(-1, -1, self._seen.shape[2])
            self._seen = self._seen[:active].gather(1, parent)
        return grown

    def rows(self, layer: Layer, number: int) -> DeviceRows:
        """Inputs of the forward of layer `number`."""
        active = len(layer.token)
        flat = self._flat[: self._rows_before[active]]
        if self._seen is not None:
            own = self._own_column[:active] + number * self._step[:active]
            # Rows beyond a request's width have no column: whichever they mark, they are not forwarded.
            own = own.clamp_(max=self._seen.shape[2] - 1).unsqueeze(2)
            self._seen = self._seen.scatter(2, own, value=True)
        tokens = layer.token.flatten().index_select(0, flat)
        return DeviceRows(tokens, self._committed[:active], self._seen)
