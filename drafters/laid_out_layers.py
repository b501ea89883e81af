"""Layers of a draft call that the host lays out one by one, each in the order of the device's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafters.device_beam import Layer
from drafters.device_growth import Growth
from drafters.device_layers import BeamCall
from drafters.device_state import DeviceState
from drafters.next_tokens import OnDevice, Sent
from engine.device_rows import DeviceRows
from engine.runner import Segment


class LaidOutLayers:
    """`DeviceLayers` of any beams."""

    def __init__(self, call: BeamCall) -> None:
        """Of the beams of `call`."""
        self._call = call
        self._state = DeviceState(call.growths, call.model.device)
        self._last: tuple[Layer, OnDevice] | None = None

    @property
    def first_rows(self) -> Sequence[int]:
        """See `DeviceLayers`."""
        return self._state.rows_before[:-1]

    def launch(self, number: int) -> Sent:
        """See `DeviceLayers`."""
        growths, roots, state = self._call.growths, self._call.roots, self._state
        active = sum(growth.num_layers > number for growth in growths)
        if self._last is not None:
            layer = state.grow(*self._last, active, number)
        elif roots:
            layer = state.grow_roots(roots)
        else:
            layer = state.first_layer()
        best = self._forward(growths[:active], number, state.rows(layer))
        self._last = layer, best
        return self._call.model.send([layer.token, layer.is_open, layer.parent, best.tokens, best.values])

    def _forward(self, growths: Sequence[Growth], number: int, rows: DeviceRows) -> OnDevice:
        """Launch the forward of one layer."""
        segments, rankings = [], []
        for growth in growths:
            job, width = growth.job, growth.width
            depth = growth.first_depth + number
            past = self._call.kv.past(job.request_id)
            segments.append(
                Segment(
                    tokens=np.zeros(width, dtype=np.int32),
                    positions=np.full(width, len(job.held.tokens) - 1 + depth, dtype=np.int32),
                    slots=growth.slots[number * width : (number + 1) * width],
                    past=np.concatenate((past, growth.above_slots, growth.slots[: number * width])),
                )
            )
            rankings += [job.held.layer_ranking(depth)] * width
        return self._call.model.launch_rows(segments, rows, rankings, self._call.num_choices)
