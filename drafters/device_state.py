"""The layers of several requests' beams on the device, and what each layer's forward is given."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from drafters.device_beam import DeviceBeams, Layer
from drafters.device_growth import Growth
from drafters.device_layers import Roots
from drafters.next_tokens import OnDevice
from engine.device_rows import DeviceRows
from engine.devices import to_device
from engine.padded_segments import power_of_two
from engine.triton_support import runs_triton


class DeviceState:
    """What the layers of several requests share on the device.

    Attributes:
        beams: how they grow.
        width: rows per request; those beyond its own width are never forwarded.
        rows_before: rows of the requests before each that are forwarded in a layer.
    """

    def __init__(self, growths: Sequence[Growth], device: torch.device) -> None:
        self.width = max(growth.width for growth in growths)
        self.beams = DeviceBeams([growth.job.beam for growth in growths], device)
        self._growths = growths
        self._device = device
        num_keys = [len(growth.job.held.tokens) for growth in growths]
        self._committed = to_device(torch.tensor(num_keys), device)
        widths = [growth.width for growth in growths]
        self._widths = to_device(torch.tensor(widths), device)
        self.rows_before = [0, *np.cumsum(widths).tolist()]
        real = np.arange(self.width) < np.array(widths)[:, None]
        self._flat = to_device(torch.from_numpy(np.flatnonzero(real)), device)
        self._row_tokens: torch.Tensor | None = None
        self._kernels: Any = None
        if runs_triton(device):
            self._kernels = importlib.import_module("drafters.growth_kernels")
            self._first_row = to_device(torch.tensor(self.rows_before[:-1]), device)
            above = [len(growth.above) for growth in growths]
            self._first_own = to_device(torch.tensor(above), device)
            most = max(growth.num_layers for growth in growths)
            # Per layer its number, for each beam. That of the first says also that it is not given to any.
            self._layers = to_device(torch.arange(most).unsqueeze(1).repeat(1, len(growths)), device)
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

    def grow_roots(self, roots: Sequence[Roots]) -> Layer:
        """The first layer of some requests, after their `roots`; of the others what the host knows."""
        numbers = [number for root in roots for number, _ in root.rows]
        # One launch grows all beams, but each as it was grown before.
        at_once = self._kernels is not None and len(numbers) == len(self._growths)
        layer, best = self.roots(numbers), self._nothing(roots[0].best)
        for root in roots:
            rows = [(self.rows_before[n] if at_once else n * self.width, row) for n, row in root.rows]
            target, source = to_device(torch.tensor(rows), self._device).unbind(1)
            best.values.index_copy_(0, target, root.best.values.index_select(0, source))
            best.tokens.index_copy_(0, target, root.best.tokens.index_select(0, source))
        if at_once:
            return self._grow_in_one_launch(self._kernels, layer, best, 0)
        return self.beams.grow(layer, best).where(layer.is_open.any(dim=1), self.first_layer())

    def roots(self, numbers: Sequence[int]) -> Layer:
        """A layer of nothing but the roots of some requests, each in its first row."""
        is_open = np.zeros((len(self._growths), self.width), dtype=np.bool_)
        is_open[list(numbers), 0] = True
        rows = to_device(torch.from_numpy(is_open), self._device)
        zeros = torch.zeros(rows.shape, dtype=torch.int64, device=self._device)
        return Layer(zeros, zeros, zeros.double(), rows)

    def _nothing(self, like: OnDevice, num_beams: int | None = None) -> OnDevice:
        """Next tokens of all rows of the first beams, none of them possible."""
        num_rows = (len(self._growths) if num_beams is None else num_beams) * self.width
        shape = (num_rows, like.values.shape[1])
        return OnDevice(like.values.new_full(shape, -torch.inf), like.tokens.new_zeros(shape))

    def grow(self, layer: Layer, best: OnDevice, active: int, number: int) -> Layer:
        """Layer `number` of the first `active` requests, after the one before.

        Args:
            layer: the one before.
            best: next tokens of its rows that were forwarded.
            active: requests that have so many layers.
            number: of the new layer.
        """
        if self._kernels is not None:
            return self._grow_in_one_launch(self._kernels, layer.first(active), best, number)
        spread, num_rows = self._nothing(best, active), self.rows_before[active]
        flat = self._flat[:num_rows]
        spread.values.index_copy_(0, flat, best.values[:num_rows])
        spread.tokens.index_copy_(0, flat, best.tokens[:num_rows])
        grown = self.beams.grow(layer.first(active), spread)
        if self._seen is not None:
            parent = grown.parent.unsqueeze(2).expand(-1, -1, self._seen.shape[2])
            self._seen = self._see_themselves(self._seen[:active].gather(1, parent), number)
        self._row_tokens = grown.token.flatten().index_select(0, flat)
        return grown

    def rows(self, layer: Layer) -> DeviceRows:
        """Inputs of the forward of `layer`, the last one grown or the first."""
        active = len(layer.token)
        if self._row_tokens is None:
            self._row_tokens = layer.token.flatten().index_select(0, self._flat)
            if self._seen is not None:
                self._seen = self._see_themselves(self._seen, 0)
        seen = None if self._seen is None else self._seen[:active]
        return DeviceRows(self._row_tokens, self._committed[:active], seen)

    def _see_themselves(self, seen: torch.Tensor, number: int) -> torch.Tensor:
        active = len(seen)
        own = self._own_column[:active] + number * self._widths[:active].unsqueeze(1)
        # Rows beyond a request's width have no column: whichever they mark, they are not forwarded.
        own = own.clamp_(max=seen.shape[2] - 1).unsqueeze(2)
        return seen.scatter(2, own, value=True)

    def _grow_in_one_launch(self, kernels: Any, layer: Layer, best: OnDevice, number: int) -> Layer:
        """`grow` by Triton, where it takes some fifty launches otherwise."""
        active, width = layer.token.shape
        num_choices, num_stops = best.tokens.shape[1], self.beams.stops.shape[1]
        grown = Layer(
            *(torch.empty_like(part) for part in (layer.token, layer.parent, layer.logp, layer.is_open))
        )
        self._row_tokens = torch.empty(self.rows_before[active], dtype=torch.int64, device=self._device)
        # Without masks any bytes do for what is not read.
        seen, columns = layer.is_open, 1
        if self._seen is not None:
            seen, columns = self._seen[:active], self._seen.shape[2]
        next_seen = torch.empty_like(seen)
        choices = power_of_two(num_choices)
        kernels.grow[(active,)](
            best.values,
            best.tokens,
            self._first_row,
            self._widths,
            self.beams.least,
            self.beams.stops,
            self._first_own,
            layer.logp,
            layer.is_open.view(torch.uint8),
            seen.view(torch.uint8),
            grown.token,
            grown.parent,
            grown.logp,
            grown.is_open.view(torch.uint8),
            next_seen.view(torch.uint8),
            self._row_tokens,
            self._layers[number],
            self._layers[0],
            width,
            num_choices,
            num_stops,
            columns,
            CHOICES=choices,
            CANDIDATES=choices * power_of_two(width),
            STOPS=power_of_two(num_stops),
            ROWS=power_of_two(width),
            COLUMNS=power_of_two(columns),
            HAS_SEEN=self._seen is not None,
            num_warps=4,
        )
        if self._seen is not None:
            self._seen = next_seen
        return grown
