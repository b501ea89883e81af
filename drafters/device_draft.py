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

from drafters.device_growth import Growth, Rows
from drafters.device_layers import BeamCall, DeviceLayers, Roots
from drafters.forwards import Missing, Reading, compute, readings
from drafters.job import Job
from drafters.laid_out_layers import LaidOutLayers
from drafters.layer_graphs import LayerGraphs
from drafters.next_tokens import NextTokens, OnDevice, Sent
from engine.kv_cache import KVCache

#: Layers launched before the host has looked at the one above them. One is enough to keep the device busy
#: where a layer takes it longer than looking takes the host.
AHEAD = 1


class DeviceDraft:
    """The forwards of one call."""

    def __init__(
        self, jobs: Sequence[Job], model: NextTokens, kv: KVCache, graphs: LayerGraphs | None = None
    ) -> None:
        """For the `jobs` of the call; the model takes rows from the device. `graphs` has captured layers."""
        self._model = model
        self._kv = kv
        self._graphs = graphs
        self._num_choices = max((job.tree.num_choices for job in jobs), default=1)
        if graphs is not None:
            self._num_choices = graphs.num_choices(self._num_choices)
        self._readings: list[tuple[Reading, OnDevice, Sent | None]] = []
        self._found: list[Growth] = []  # those with most layers first
        self._growths: dict[str, Growth] = {}  # of them, those that are grown on the device still
        self._layers: DeviceLayers | None = None
        self._sent: list[Sent] = []
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
            self._layers = self._layers_of(self._found)
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

    def _layers_of(self, growths: Sequence[Growth]) -> DeviceLayers:
        """What launches them: captured layers, where there are some that serve."""
        number = {growth.job.request_id: i for i, growth in enumerate(growths) if not growth.frontier}
        roots = []
        for reading, best, _ in self._readings:
            rows = [(number[job.request_id], row) for job, row in reading.roots if job.request_id in number]
            if rows:
                roots.append(Roots(rows, best))
        call = BeamCall(growths, roots, self._model, self._kv, self._num_choices)
        captured = None if self._graphs is None else self._graphs.layers(call)
        return LaidOutLayers(call) if captured is None else captured

    def _launch(self, num_layers: int) -> None:
        """Launch layers until there are so many, or all."""
        for number in range(len(self._sent), min(num_layers, self._num_layers)):
            assert self._layers is not None
            self._sent.append(self._layers.launch(number))

    def _receive(self, num_layers: int) -> None:
        """Have the first layers on the host, and as many as it may be ahead launched."""
        for number in range(self._num_received, min(num_layers, self._num_layers)):
            self._launch(number + 1 + AHEAD)
            arrays = self._model.receive(self._sent[number])
            token, is_open, parent, tokens, values = (array.tolist() for array in arrays)
            assert self._layers is not None
            for index, (growth, start) in enumerate(zip(self._found, self._layers.first_rows, strict=False)):
                if growth.num_layers <= number:
                    break
                end = start + growth.width
                of = {
                    (parent[index][row], token[index][row]): row
                    for row in range(growth.width)
                    if is_open[index][row]
                }
                growth.rows.append(Rows(values[start:end], tokens[start:end], of))
            self._num_received += 1

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
