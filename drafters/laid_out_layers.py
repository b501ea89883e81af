"""Layers of a draft call that the host lays out one by one, each in the order of the device's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafters.device_beam import Layer
from drafters.device_growth import Growth
from drafters.device_layers import Roots
from drafters.device_state import DeviceState
from drafters.next_tokens import NextTokens, OnDevice, Sent
from engine.device_rows import DeviceRows
from engine.kv_cache import KVCache
from engine.runner import Segment


class LaidOutLayers:
    """`DeviceLayers` of any beams."""

    def __init__(
        self,
        growths: Sequence[Growth],
        roots: Sequence[Roots],
        model: NextTokens,
        kv: KVCache,
        num_choices: int,
    ) -> None:
        """Of `growths`, those with most layers first; the model takes rows from the device.

        Args:
            growths: of the call.
            roots: next tokens of those whose first layer the device is to grow.
            model: what is forwarded.
            kv: slot tables.
            num_choices: next tokens kept of each row.
        """
        self._growths, self._roots = growths, roots
        self._model, self._kv, self._num_choices = model, kv, num_choices
        self._state = DeviceState(growths, model.device)
        self._last: tuple[Layer, OnDevice] | None = None

    @property
    def first_rows(self) -> Sequence[int]:
        """See `DeviceLayers`."""
        return self._state.rows_before[:-1]

    def launch(self, number: int) -> Sent:
        """See `DeviceLayers`."""
        growths, state = self._growths, self._state
        active = sum(growth.num_layers > number for growth in growths)
        if self._last is not None:
            layer = state.grow(*self._last, active, number)
        elif self._roots:
            layer = state.grow_roots(self._roots)
        else:
            layer = state.first_layer()
        best = self._forward(growths[:active], number, state.rows(layer))
        self._last = layer, best
        return self._model.send([layer.token, layer.is_open, layer.parent, best.tokens, best.values])

    def _forward(self, growths: Sequence[Growth], number: int, rows: DeviceRows) -> OnDevice:
        """Launch the forward of one layer."""
        segments, rankings = [], []
        for growth in growths:
            job, width = growth.job, growth.width
            depth = growth.first_depth + number
            past = self._kv.past(job.request_id)
            segments.append(
                Segment(
                    tokens=np.zeros(width, dtype=np.int32),
                    positions=np.full(width, len(job.held.tokens) - 1 + depth, dtype=np.int32),
                    slots=growth.slots[number * width : (number + 1) * width],
                    past=np.concatenate((past, growth.above_slots, growth.slots[: number * width])),
                )
            )
            rankings += [job.held.layer_ranking(depth)] * width
        return self._model.launch_rows(segments, rows, rankings, self._num_choices)
