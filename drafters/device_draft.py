"""One draft call whose forwards follow each other on the device, which never waits for the host in between.

The host knows beforehand how many layers each request may get and how wide they are, so slots, positions and
the keys of all layers are laid out from depth and width. Which tokens a layer holds, after which parents, and
so which keys its rows see, the device decides from the layer before (`drafters.device_beam`). Nodes that get
no children leave rows that nobody sees.

Meanwhile the host grows the same trees by the same code as ever (`drafters.forwards.grow`), from the best
next tokens of all rows, which follow layer by layer. It asks for a layer when the next one is being computed
already, and so hides its own work behind that. The rules that end whole trees are asked on the host: where
all trees have ended, no more than `AHEAD` layers were computed for nothing. Should the host choose another
node than the device did, which takes a tie within rounding, it forwards that one itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafters.device_beam import Layer
from drafters.device_growth import Growth, Rows
from drafters.device_state import DeviceState
from drafters.forwards import Missing, Reading, compute, readings
from drafters.job import Job
from drafters.next_tokens import NextTokens, OnDevice, Sent
from engine.device_rows import DeviceRows
from engine.kv_cache import KVCache
from engine.runner import Segment

#: Layers launched before the host has looked at the one above them. One is enough to keep the device busy
#: where a layer takes it longer than looking takes the host.
AHEAD = 1


class DeviceDraft:
    """The forwards of one call."""

    def __init__(self, jobs: Sequence[Job], model: NextTokens, kv: KVCache) -> None:
        """For the `jobs` of the call; the model takes rows from the device."""
        self._model = model
        self._kv = kv
        self._num_choices = max((job.tree.num_choices for job in jobs), default=1)
        self._readings: list[tuple[Reading, OnDevice, Sent | None]] = []
        self._state: DeviceState | None = None
        self._found: list[Growth] = []  # those with most layers first
        self._growths: dict[str, Growth] = {}  # of them, those that are grown on the device still
        self._last: tuple[Layer, OnDevice] | None = None
        self._layers: list[Sent] = []
        self._num_received = 0

    def catch_up(self, jobs: Sequence[Job], max_rows: int) -> None:
        """As `drafters.forwards.catch_up`, without waiting for what the roots' next tokens are."""
        for reading in readings(jobs, self._kv, max_rows):
            best = self._model.launch(reading.segments, reading.keep, reading.rankings, self._num_choices)
            sent = self._model.send(best) if len(reading.keep) else None
            self._readings.append((reading, best, sent))

    def begin(self, jobs: Sequence[Job]) -> None:
        """Launch the first layers of all jobs that can be grown on the device; their `slots` are reserved."""
        takes_trees = self._model.takes_trees
        growths = [Growth.of(job, takes_trees=takes_trees) for job in jobs]
        self._found = [growth for growth in growths if growth is not None]
        self._found.sort(key=lambda growth: -growth.num_layers)
        self._growths = {growth.job.request_id: growth for growth in self._found}
        if self._found:
            self._state = DeviceState(self._found, self._model.device)
            self._launch(AHEAD)

    def settle(self) -> None:
        """Wait for the roots' next tokens."""
        for reading, _, sent in self._readings:
            if sent is not None:
                values, tokens = self._model.receive(sent)
                reading.settle(values.tolist(), tokens.tolist())

    def compute(self, missing: Missing) -> None:
        """As `drafters.forwards.compute`, by forwards that the device was told of before."""
        growths = [(self._growths.get(job.request_id), nodes) for job, nodes in missing]
        asked = [growth.last_layer(nodes) for growth, nodes in growths if growth is not None]
        self._receive(max(asked, default=-1) + 1)
        num_growing = len(self._growths)
        rest = [(job, left) for job, nodes in missing if (left := self._taken(job, nodes))]
        if len(self._growths) < num_growing:  # layers to come would write where the host does from here on
            self._launch(self._num_layers)
        if rest:
            compute(rest, self._model, self._kv)

    @property
    def _num_layers(self) -> int:
        return self._found[0].num_layers if self._found else 0

    def _launch(self, num_layers: int) -> None:
        """Launch layers until there are so many, or all."""
        growths, state = self._found, self._state
        for number in range(len(self._layers), min(num_layers, self._num_layers)):
            assert state is not None
            active = sum(growth.num_layers > number for growth in growths)
            if self._last is None:
                layer = self._first_layer(growths, state)
            else:
                layer = state.grow(*self._last, active, number)
            best = self._forward(growths[:active], number, state.rows(layer))
            self._last = layer, best
            found = [best.tokens, layer.token, layer.parent, best.values, layer.is_open]
            self._layers.append(self._model.send(found))

    def _receive(self, num_layers: int) -> None:
        """Have the first layers on the host, and as many as it may be ahead launched."""
        for number in range(self._num_received, min(num_layers, self._num_layers)):
            self._launch(number + 1 + AHEAD)
            arrays = self._model.receive(self._layers[number])
            tokens, token, parent, values, is_open = (array.tolist() for array in arrays)
            start = 0
            for index, growth in enumerate(self._found[: len(token)]):
                end = start + growth.width
                of = {
                    (parent[index][row], token[index][row]): row
                    for row in range(growth.width)
                    if is_open[index][row]
                }
                growth.rows.append(Rows(values[start:end], tokens[start:end], of))
                start = end
            assert start == len(values), f"rows of layer {number}"
            self._num_received += 1

    def _first_layer(self, growths: Sequence[Growth], state: DeviceState) -> Layer:
        """Where the host knows it, what it says; elsewhere grown from the root's next tokens."""
        number = {growth.job.request_id: i for i, growth in enumerate(growths) if not growth.frontier}
        if not number:
            return state.first_layer()
        next_tokens = []
        for reading, best, _ in self._readings:
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
