"""One draft call whose forwards follow each other on the device, without the host waiting in between.

The host knows beforehand how many layers each request may get and how wide they are, so slots, positions and
the keys of all layers are laid out from depth and width. Which tokens a layer holds, after which parents, and
so which keys its rows see, the device decides from the layer before (`drafters.device_beam`). Nodes that get
no children leave rows that nobody sees. At the end one transfer brings the best next tokens of all rows to
the host, and there the trees are grown by the same code as ever (`drafters.forwards.grow`), which finds the
forwards it asks for already made. So the rules that end whole trees are asked there, and layers behind such
an end are dropped; and should the host choose another node than the device did, which takes a tie within
rounding, it forwards that one itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drafters.device_beam import Layer
from drafters.device_growth import Growth, Rows
from drafters.device_state import DeviceState
from drafters.forwards import Missing, Reading, compute, readings
from drafters.job import Job
from drafters.next_tokens import NextTokens, OnDevice
from engine.device_rows import DeviceRows
from engine.kv_cache import KVCache
from engine.runner import Segment


class DeviceDraft:
    """The forwards of one call."""

    def __init__(self, jobs: Sequence[Job], model: NextTokens, kv: KVCache) -> None:
        """For the `jobs` of the call; the model takes rows from the device."""
        self._model = model
        self._kv = kv
        self._num_choices = max((job.tree.num_choices for job in jobs), default=1)
        self._readings: list[tuple[Reading, OnDevice]] = []
        self._layers: list[tuple[Layer, OnDevice]] = []
        self._growths: dict[str, Growth] = {}  # those with most layers first

    def catch_up(self, jobs: Sequence[Job], max_rows: int) -> None:
        """As `drafters.forwards.catch_up`; what the roots' next tokens are stays on the device."""
        for reading in readings(jobs, self._kv, max_rows):
            best = self._model.launch(reading.segments, reading.keep, reading.rankings, self._num_choices)
            self._readings.append((reading, best))

    def launch_layers(self, jobs: Sequence[Job]) -> None:
        """Forward the layers of all jobs that can be grown on the device; their `slots` are reserved."""
        takes_trees = self._model.takes_trees
        growths = [Growth.of(job, takes_trees=takes_trees) for job in jobs]
        found = [growth for growth in growths if growth is not None]
        found.sort(key=lambda growth: -growth.num_layers)
        self._growths = {growth.job.request_id: growth for growth in found}
        if not found:
            return
        state = DeviceState(found, self._model.device)
        layer = self._first_layer(found, state)
        for number in range(found[0].num_layers):
            active = sum(growth.num_layers > number for growth in found)
            if number:
                layer = state.grow(layer, self._layers[-1][1], active, number)
            rows = state.rows(layer)
            self._layers.append((layer, self._forward(found[:active], number, rows)))

    def _first_layer(self, growths: Sequence[Growth], state: DeviceState) -> Layer:
        """Where the host knows it, what it says; elsewhere grown from the root's next tokens."""
        number = {growth.job.request_id: i for i, growth in enumerate(growths) if not growth.frontier}
        if not number:
            return state.first_layer()
        next_tokens = []
        for reading, best in self._readings:
            roots = reading.roots
            pairs = [(number[job.request_id], row) for job, row in roots if job.request_id in number]
            if pairs:
                next_tokens.append((pairs, best))
        return state.grow_roots(list(number.values()), next_tokens)

    def _forward(self, growths: Sequence[Growth], number: int, rows: DeviceRows) -> OnDevice:
        """Launch the forward of one layer."""
        segments, rankings = [], []
        for growth in growths:
            job, width = growth.job, growth.width
            depth = growth.first_depth + number
            above = np.array([job.tree.slot[node] for node in growth.above], dtype=np.int32)
            past = self._kv.past(job.request_id)
            segments.append(
                Segment(
                    tokens=np.zeros(width, dtype=np.int32),
                    positions=np.full(width, len(job.held.tokens) - 1 + depth, dtype=np.int32),
                    slots=growth.slots[number * width : (number + 1) * width],
                    past=np.concatenate((past, above, growth.slots[: number * width])),
                )
            )
            rankings += [job.held.layer_ranking(depth)] * width
        return self._model.launch_rows(segments, rows, rankings, self._num_choices)

    def finish(self) -> None:
        """Wait for the device, take in the roots' next tokens, and keep those of the layers for `compute`."""
        best = [found for _, found in self._readings] + [found for _, found in self._layers]
        if not best:
            return
        tensors = [part for found in best for part in (found.values.view(torch.int32), found.tokens.int())]
        for layer, _ in self._layers:
            tensors += [layer.token.int(), layer.parent.int(), layer.is_open.int()]
        arrays = iter(self._model.fetch(tensors))
        lists = [(next(arrays).view(np.float32).tolist(), next(arrays).tolist()) for _ in best]
        for (reading, _), (values, tokens) in zip(self._readings, lists, strict=False):
            reading.settle(values, tokens)
        for number, (values, tokens) in enumerate(lists[len(self._readings) :]):
            token, parent, is_open = (next(arrays).tolist() for _ in range(3))
            start = 0
            for index, growth in enumerate(list(self._growths.values())[: len(token)]):
                end = start + growth.width
                of = {
                    (parent[index][row], token[index][row]): row
                    for row in range(growth.width)
                    if is_open[index][row]
                }
                growth.rows.append(Rows(values[start:end], tokens[start:end], of))
                start = end
            assert start == len(values), f"rows of layer {number}"

    def compute(self, missing: Missing) -> None:
        """As `drafters.forwards.compute`, with the forwards that were launched."""
        rest = [(job, left) for job, nodes in missing if (left := self._taken(job, nodes))]
        if rest:
            compute(rest, self._model, self._kv)

    def _taken(self, job: Job, nodes: list[int]) -> list[int]:
        """Give a job's tree what the device computed of `nodes`; which of them it did not."""
        growth = self._growths.get(job.request_id)
        if growth is None:
            return nodes
        held, left = [], []
        for node in nodes:
            place = growth.find(node)
            if place is None:
                left.append(node)
                continue
            layer, row = place
            job.tree.learn(node, growth.rows[layer].values[row], growth.rows[layer].tokens[row])
            held.append((node, int(growth.slots[layer * growth.width + row])))
        if held:
            job.tree.hold(held)
            job.slots = job.slots[~np.isin(job.slots, [slot for _, slot in held])]
        if left:  # forwarded by the host from here on, into slots that later layers of the device may have
            del self._growths[job.request_id]
        return left
