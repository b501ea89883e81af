"""Captured layers of a draft call: one launch a layer, laid out by the host once a draft.

A layer is chosen and grown from the best next tokens of the one before, forwarded, and its own best next
tokens found; its tensors are moved on to it by itself (`engine.moving_rows`). What the host looks at lies in
one piece of memory, and comes in one transfer.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from drafters.device_growth import Growth
from drafters.device_layers import BeamCall
from drafters.next_tokens import NextTokens, Sent
from engine.best_tokens import highest_by_triton
from engine.cuda_graphs import GraphedRunner
from engine.devices import overwrite, staging
from engine.kv_cache import KVCache
from engine.moving_rows import MOST_COLUMNS, BeamRows, BeamShape
from engine.packed import Kind, arrays_in, num_bytes, tensors_in
from engine.padded_segments import MOST_ROWS_PADDED, power_of_two
from engine.sampling_params import SamplingParams
from engine.triton_sampling import FIELDS, POSITION, described_rows, shape_rows

#: Tokens that end a request, at most.
MOST_STOPS = 8
_NOBODY = SamplingParams(temperature=0.0)


class LayerShape(NamedTuple):
    """Of a captured layer: of what beams, how many next tokens are kept, and whether noise is added."""

    beams: BeamShape
    num_choices: int
    is_sampled: bool

    @property
    def num_rows(self) -> int:
        """Of a layer."""
        return self.beams.num_rows

    def serves(self, other: Any) -> bool:
        """Whether layers of another shape may be computed in this one: it holds them, and not much more."""
        assert isinstance(other, LayerShape)
        holds = self.beams.requests >= other.beams.requests and self.beams.width >= other.beams.width
        ranks = self.num_choices >= other.num_choices and self.is_sampled >= other.is_sampled
        return holds and ranks and self.num_rows <= other.num_rows + MOST_ROWS_PADDED


class CapturedLayers:
    """`DeviceLayers` of beams of one shape.

    Attributes:
        shape: which.
        graph: of `compute`, once captured.
    """

    def __init__(self, runner: GraphedRunner, shape: LayerShape) -> None:
        """Of beams of nobody, until `begin`."""
        self.shape = shape
        self.graph: torch.cuda.CUDAGraph | None = None
        self._runner = runner
        self._kernels: Any = importlib.import_module("drafters.growth_kernels")
        (requests, width), rows, k = shape.beams, shape.beams.num_rows, shape.num_choices
        beams, integer, real = (requests, width), torch.int64, torch.float64
        own: list[Kind] = [
            ((requests,), integer),
            ((requests, MOST_STOPS), integer),
            ((2, requests), integer),
            ((requests,), real),
            (beams, real),
        ]
        self._told: list[Kind] = [*own, (beams, integer), (beams, integer)]  # by the host, at the beginning
        of_nodes: list[Kind] = [(beams, integer), (beams, integer), (beams, integer)]
        self._left: list[Kind] = [*of_nodes, ((rows, k), integer), ((rows, k), torch.float32)]
        memory = torch.zeros(num_bytes(own + self._left), dtype=torch.uint8, device=runner.device)
        self._to_tell = memory[: num_bytes(self._told)]
        self._to_leave = memory[num_bytes(own) :]
        self._is_given, self._stops, self._root_rows, self._least, self._logp = tensors_in(memory, own)
        left = tensors_in(self._to_leave, self._left)
        self._token, self._is_open, self._parent, self._tokens, self._values = left
        self._rows = runner.moving_rows(shape.beams, self._token.view(-1))
        self._first_row = torch.arange(requests, device=runner.device) * width
        self._table = torch.zeros(rows, FIELDS, dtype=torch.int32, device=runner.device)
        self._model: NextTokens | None = None

    @property
    def first_rows(self) -> Sequence[int]:
        """See `DeviceLayers`."""
        return range(0, self.shape.beams.num_rows, self.shape.beams.width)

    def begin(self, call: BeamCall) -> bool:
        """Describe the layers of a call.

        Returns:
            False if they find no room; then nothing was done.
        """
        growths, roots = call.growths, call.roots
        beams = [_beam_rows(growth, call.kv) for growth in growths]
        if not self._rows.holds(beams):
            return False
        self._model = call.model
        self._rows.begin(beams)
        staged = staging(len(self._to_tell), torch.uint8, self._to_tell.device)
        staged.zero_()
        told = arrays_in(staged.numpy(), self._told)
        is_given, stops, root_rows, least, logp, token, is_open = told
        stops[:] = -1
        for number, growth in enumerate(growths):
            plan = growth.job.beam.plan
            least[number] = plan.stop_token_logp
            ends = sorted(growth.job.beam.stops)
            stops[number, : len(ends)] = ends
            is_given[number] = bool(growth.frontier)
            is_open[number, 0] = not growth.frontier  # the root, a layer before the first
            for row, (node, value) in enumerate(growth.frontier):
                token[number, row], logp[number, row] = growth.job.tree.token[node], value
                is_open[number, row] = True
        pairs = [(number * self.shape.beams.width, row) for root in roots for number, row in root.rows]
        root_rows[:, : len(pairs)] = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self._to_tell.copy_(staged, non_blocking=True)
        start = 0
        for root in roots:
            target, source = self._root_rows[:, start : start + len(root.rows)].unbind(0)
            k = root.best.tokens.shape[1]  # there may be fewer; of what else is there nothing is read
            self._values[:, :k].index_copy_(0, target, root.best.values.index_select(0, source))
            self._tokens[:, :k].index_copy_(0, target, root.best.tokens.index_select(0, source))
            start += len(root.rows)
        if self.shape.is_sampled:
            overwrite(self._table, self._sampling(growths))
        return True

    def launch(self, number: int) -> Sent:
        """See `DeviceLayers`."""
        assert self._model is not None
        assert self.graph is not None
        return self._model.replay(self.graph.replay, self._to_leave, self._left)

    def compute(self) -> None:
        """One layer; captured."""
        rows, shape = self._rows, self.shape
        (requests, width), k = shape.beams, shape.num_choices
        has_seen, choices = width > 1, power_of_two(k)
        seen = rows.seen if has_seen else self._is_open  # which is not read
        self._kernels.grow[(requests,)](
            self._values,
            self._tokens,
            self._first_row,
            rows.widths,
            self._least,
            self._stops,
            rows.own_column,
            self._logp,
            self._is_open,
            seen,
            self._token,
            self._parent,
            self._logp,
            self._is_open,
            seen,
            rows.tokens,
            rows.layer,
            self._is_given,
            width,
            k,
            MOST_STOPS,
            MOST_COLUMNS,
            CHOICES=choices,
            CANDIDATES=choices * power_of_two(width),
            STOPS=MOST_STOPS,
            ROWS=power_of_two(width),
            COLUMNS=MOST_COLUMNS,
            HAS_SEEN=has_seen,
            num_warps=4,
        )
        rows.move_on()
        scores = self._runner.compute_rows(rows)
        if shape.is_sampled:
            scores = shape_rows(scores, self._table, perturbed=True)
            self._table[:, POSITION].add_(1)
        highest_by_triton(scores, k, out=(self._values, self._tokens))

    def _sampling(self, growths: Sequence[Growth]) -> np.ndarray[Any, Any]:
        """int32 [rows, FIELDS], how the tokens after the first layer's rows are ranked."""
        (requests, width), vocab = self.shape.beams, self._runner.shape.vocab_size
        params, positions = [_NOBODY] * requests, [0] * requests
        for number, growth in enumerate(growths):
            held = growth.job.held
            params[number] = held.spec.sampling
            positions[number] = len(held.tokens) + growth.first_depth - held.spec.prompt_len
        return described_rows(params, positions, vocab).repeat(width, axis=0)


def is_captured(growth: Growth) -> bool:
    """Whether captured layers can do what a request asks for."""
    return not growth.job.held.spec.sampling.adjusts_logits and len(growth.job.beam.stops) <= MOST_STOPS


def _beam_rows(growth: Growth, kv: KVCache) -> BeamRows:
    """What a request's layers are given; a single path is no tree to those that see it."""
    job, width = growth.job, growth.width
    seen = None
    if growth.frontier:
        column = {node: number for number, node in enumerate(growth.above)}
        seen = np.zeros((width, len(column) + width), dtype=np.bool_)
        for row, (node, _) in enumerate(growth.frontier):
            seen[row, [column[above] for above in job.tree.above(node)]] = True
            seen[row, len(column) + row] = True
    return BeamRows(
        past=kv.past(job.request_id),
        above=growth.above_slots,
        slots=growth.slots[: growth.num_layers * width],
        width=width,
        position=len(job.held.tokens) - 1 + growth.first_depth,
        seen=seen,
    )
