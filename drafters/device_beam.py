"""Beam growth of several candidate trees as tensors: `engine.beam` for a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafters.next_tokens import OnDevice
from engine.beam import Beam
from engine.devices import to_device


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The last layer of each beam, by row, best path first; rows without a node are closed.

    Attributes:
        token: int64 [beams, width].
        parent: int64 [beams, width], row of the parent in the layer before.
        logp: float64 [beams, width], of the path: in the precision of the host, so that both order alike.
        is_open: bool [beams, width], whether the row is a node that gets children.
    """

    token: torch.Tensor
    parent: torch.Tensor
    logp: torch.Tensor
    is_open: torch.Tensor

    def first(self, num_beams: int) -> Layer:
        """Of the first `num_beams` beams only."""
        return Layer(
            self.token[:num_beams], self.parent[:num_beams], self.logp[:num_beams], self.is_open[:num_beams]
        )

    def where(self, chosen: torch.Tensor, other: Layer) -> Layer:
        """This layer for the beams `chosen` (bool [beams]), the other one for the rest."""
        column = chosen.unsqueeze(1)
        return Layer(
            torch.where(column, self.token, other.token),
            torch.where(column, self.parent, other.parent),
            torch.where(column, self.logp, other.logp),
            torch.where(column, self.is_open, other.is_open),
        )


class DeviceBeams:
    """What decides how beams grow, on the device. The rules that end whole trees are not among it.

    Attributes:
        least: float64 [beams, 1], log-probability below which a token gets no children.
        stops: int64 [beams, n], tokens that get none; filled up with -1.
    """

    def __init__(self, beams: Sequence[Beam], device: torch.device) -> None:
        """For these beams, in order."""
        stops = np.full((len(beams), max(1, *(len(beam.stops) for beam in beams))), -1, dtype=np.int64)
        for line, beam in zip(stops, beams, strict=True):
            line[: len(beam.stops)] = sorted(beam.stops)
        plans = [beam.plan for beam in beams]
        self._width = to_device(torch.tensor([[plan.width] for plan in plans]), device)
        least = [[plan.stop_token_logp] for plan in plans]
        self.least = to_device(torch.tensor(least, dtype=torch.float64), device)
        self.stops = to_device(torch.from_numpy(stops), device)

    def grow(self, layer: Layer, best: OnDevice) -> Layer:
        """The next layer of the first beams, of which `layer` has the last one.

        Args:
            layer: of at most as many beams as there are.
            best: next tokens of each of its rows, [beams * width, k]; rows of nobody have any.
        """
        num_beams, rows = layer.token.shape
        values = best.values.view(num_beams, rows, -1).double()
        tokens = best.tokens.view(num_beams, rows, -1)
        width, num_choices = self._width[:num_beams], tokens.shape[2]
        choice = torch.arange(num_choices, device=values.device)
        row = torch.arange(rows, device=values.device)
        counts = layer.is_open.unsqueeze(2) & (values > -torch.inf) & (choice < width.unsqueeze(2))
        loss = torch.where(counts, -layer.logp.unsqueeze(2) - values, torch.inf).flatten(1)
        loss, index = loss.sort(dim=1, stable=True)  # ties by row, then by choice, as tuples on the host
        loss, index = loss[:, :rows], index[:, :rows]
        token = tokens.flatten(1).gather(1, index)
        is_stop = (token.unsqueeze(2) == self.stops[:num_beams].unsqueeze(1)).any(dim=2)
        is_sure = values.flatten(1).gather(1, index) >= self.least[:num_beams]
        is_node = (loss < torch.inf) & (row < width)
        return Layer(token, index // num_choices, -loss, is_node & is_sure & ~is_stop)
