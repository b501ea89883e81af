"""Rows described on the device against the same rows described on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda_graphs import GraphedRunner
from engine.device_rows import DeviceRows, DeviceRowsRunner, all_rows
from engine.hf_runner import HFRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import LlamaWeights, load_llama_weights
from engine.runner import Segment
from tests.engine import tiny_models
from tests.examples import examples

SLOTS = 400


@pytest.fixture(scope="module")
def weights() -> LlamaWeights:
    return load_llama_weights(tiny_models.build("llama"))


def described(
    rng: np.random.Generator, shapes: list[tuple[int, int, int]], is_chain: bool
) -> tuple[list[Segment], list[Segment], DeviceRows]:
    """Segments of (committed, earlier, rows), the same without tokens and visibility, and those as rows."""
    slots = rng.permutation(SLOTS).astype(np.int32)
    known, blank = [], []
    most = max(rows for _, _, rows in shapes)
    seen = np.zeros((len(shapes), most, max(earlier + rows for _, earlier, rows in shapes)), dtype=np.bool_)
    for index, (committed, earlier, rows) in enumerate(shapes):
        own, slots = slots[: committed + earlier + rows], slots[committed + earlier + rows :]
        visible = rng.random((rows, earlier + rows)) < 0.5
        visible[:, earlier:] |= np.eye(rows, dtype=np.bool_)
        seen[index, :rows, : earlier + rows] = visible
        positions = rng.integers(0, 100, rows).astype(np.int32)
        past, new = own[: committed + earlier], own[committed + earlier :]
        tokens = rng.integers(0, tiny_models.VOCABULARY, rows).astype(np.int32)
        known.append(Segment(tokens, positions, new, past, None if is_chain else visible))
        blank.append(Segment(np.zeros_like(tokens), positions, new, past))
    tokens = torch.from_numpy(np.concatenate([segment.tokens for segment in known])).long()
    committed_keys = torch.tensor([committed for committed, _, _ in shapes])
    return known, blank, DeviceRows(tokens, committed_keys, None if is_chain else torch.from_numpy(seen))


def assert_rows_are_forwarded(
    runner: LlamaRunner | HFRunner | GraphedRunner,
    weights: LlamaWeights,
    shapes: list[tuple[int, int, int]],
    is_chain: bool,
    seed: int,
) -> None:
    """By `runner`, described on the device, as by a plain one that the host tells everything."""
    rng = np.random.default_rng(seed)
    if is_chain:
        shapes = [(committed, earlier, 1) for committed, earlier, _ in shapes]
    plain = LlamaRunner(weights, SLOTS)
    known, blank, rows = described(rng, shapes, is_chain)
    # Past keys that are no zeros, in both.
    for segment in known:
        past = segment.past
        tokens = rng.integers(0, tiny_models.VOCABULARY, len(past)).astype(np.int32)
        earlier = Segment(tokens, np.arange(len(past), dtype=np.int32), past, past[:0])
        for each in (plain, runner):
            each.forward([earlier], all_rows([earlier]))
    expected = plain.forward(known, all_rows(known))
    assert isinstance(runner, DeviceRowsRunner)
    assert runner.takes_trees
    for _ in range(2):
        got = runner.forward_rows(blank, rows)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert runner.key_tokens.real == plain.key_tokens.real


@pytest.mark.parametrize("is_graphed", [False, True])
@pytest.mark.parametrize("kind", ["lean", "hf"])
@examples(40)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 8), st.integers(1, 6)), min_size=1, max_size=5
    ),
    is_chain=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rows_of_the_device_are_forwarded_as_those_of_the_host(
    weights: LlamaWeights,
    kind: str,
    is_graphed: bool,
    shapes: list[tuple[int, int, int]],
    is_chain: bool,
    seed: int,
) -> None:
    def made(num_slots: int) -> LlamaRunner | HFRunner:
        return (
            LlamaRunner(weights, num_slots)
            if kind == "lean"
            else HFRunner(tiny_models.build("llama"), num_slots)
        )

    runner = GraphedRunner(made(SLOTS + 1), capture_at=1) if is_graphed else made(SLOTS)
    assert_rows_are_forwarded(runner, weights, shapes, is_chain, seed)
