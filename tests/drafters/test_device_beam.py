"""Beams as tensors against beams as lists: the same nodes in the same order, ties included."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.device_beam import DeviceBeams, Layer
from drafters.messages import DraftPlan
from drafters.next_tokens import OnDevice
from engine.beam import Beam
from engine.best_tokens import best_on_host, highest
from tests.examples import examples

VOCAB = 6
CPU = torch.device("cpu")


@examples(200)
@given(
    plans=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([-math.inf, -1.5, -1.0])), min_size=1, max_size=4
    ),
    stops=st.lists(st.frozensets(st.integers(0, VOCAB - 1), max_size=2), min_size=4, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_layers_are_those_of_the_host(
    plans: list[tuple[int, float]], stops: list[frozenset[int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    depth, width = 4, max(own for own, _ in plans)
    beams = [
        Beam(0, DraftPlan(depth=depth, width=own, stop_token_logp=least), stops[i])
        for i, (own, least) in enumerate(plans)
    ]
    device = DeviceBeams(beams, CPU)
    zeros = torch.zeros((len(beams), width), dtype=torch.int64)
    layer = Layer(zeros, zeros, zeros.double(), torch.arange(width).expand(len(beams), width) == 0)
    rows = [{0: 0} for _ in beams]  # per beam, the row of each node of the frontier
    for number in range(depth):
        # Few different values, so that paths tie; some tokens are ruled out.
        scores = rng.choice(np.float32([-0.5, -1.0, -1.5, -np.inf]), (len(beams) * width, VOCAB))
        values, tokens = best_on_host(scores.copy(), max(width, 2))
        layer = device.grow(layer, OnDevice(torch.from_numpy(values), torch.from_numpy(tokens)))
        for index, beam in enumerate(beams):
            if not beam.frontier:
                assert not layer.is_open[index].any()
                continue
            parents = rows[index]
            at = [index * width + parents[node] for node in beam.frontier]
            beam.grow(values[at].tolist(), tokens[at].tolist())
            rows[index] = {node: row for row, node in enumerate(beam.layer)}
            for node, row in rows[index].items():
                assert layer.token[index, row] == beam.token[node]
                assert layer.parent[index, row] == parents[beam.parent[node]]
                assert layer.logp[index, row] == beam.logp[node]
            if number < depth - 1:  # after the last layer the host extends none
                is_open = [row for node, row in rows[index].items() if node in beam.frontier]
                assert layer.is_open[index].nonzero().flatten().tolist() == is_open


@given(
    scores=st.lists(
        st.lists(
            st.sampled_from([0.0, -0.0, -1e-38, -0.25, -0.2500001, -3e38, -math.inf, 2.0]),
            min_size=7,
            max_size=7,
        ),
        min_size=1,
        max_size=3,
    ),
    k=st.integers(1, 9),
)
def test_the_highest_come_in_order_and_ties_by_token(scores: list[list[float]], k: int) -> None:
    rows = torch.tensor(scores, dtype=torch.float32)
    values, tokens = highest(rows, k)
    order = [sorted(range(7), key=lambda token, row=row: (-row[token], token))[:k] for row in rows.tolist()]
    assert tokens.tolist() == order
    assert torch.equal(values, rows.gather(1, tokens))
