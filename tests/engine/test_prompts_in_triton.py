"""Prompts and requests that decode in one launch of attention in Triton, captured and not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import attention_tiles
from engine.attention import PaddedAttention
from engine.cuda_graphs import GraphedRunner
from engine.device_rows import all_rows
from engine.llama_runner import LlamaRunner
from engine.llama_weights import LlamaWeights, load_llama_weights
from engine.padded_segments import MOST_PROMPT_ROWS, Shape
from engine.triton_attention import TritonAttention
from tests.engine import tiny_models
from tests.engine.test_static_forwards import batch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these kernels on the GPU"),
    # Rows of padding are whatever memory held: numpy warns of it, a GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SLOTS = 400


@pytest.fixture(scope="module")
def weights() -> LlamaWeights:
    return load_llama_weights(tiny_models.build("llama"))


@pytest.mark.parametrize("rows", [70, 130])
def test_a_prompt_takes_several_tiles(rows: int) -> None:
    """Before, behind and between requests that take one; there is none for each row there might be."""
    slots = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)
    shapes = [(9, 1, "causal"), (60, rows, "causal"), (5, 3, "tree"), (4, 1, "causal"), (20, 33, "causal")]
    segments = batch(np.random.default_rng(1), [*shapes, (2, 1, "causal")], slots)
    padded = PaddedAttention(SLOTS, dtype=torch.float32)
    attention = TritonAttention(SLOTS, dtype=torch.float32, device="cpu")
    attention.allocate(0, 2, 16, 16)
    attention.storage(0).normal_()
    padded.allocate(0, 2, 16, 16)
    padded.storage(0).copy_(attention.storage(0))
    # As Transformers hands them over: heads before rows.
    q = torch.randn(4, rows + 39, 16).transpose(0, 1)
    got = attention.attend(attention.plan(segments), 0, q)
    torch.testing.assert_close(got, padded.attend(padded.plan(segments), 0, q), atol=1e-5, rtol=1e-4)


@pytest.mark.thorough
def test_a_prompt_is_captured_with_requests_that_decode(
    weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its length; and what it is padded with, requests of nobody behind it, has no rows."""
    monkeypatch.setattr(attention_tiles, "ENOUGH_PROGRAMS", 16)  # so that keys are split
    rng = np.random.default_rng(0)
    plain = LlamaRunner(weights, SLOTS)
    attention = TritonAttention(SLOTS + 1, dtype=torch.float32, device="cpu")
    static = GraphedRunner(LlamaRunner(weights, SLOTS + 1, attention), capture_at=1)
    for shapes in (
        [(7, 1, "causal"), (4, 80, "causal"), (8, 3, "tree"), (9, 1, "causal"), (3, 1, "causal")],
        [(30, 65, "causal"), (0, 7, "tree"), (8, 5, "tree"), (9, 1, "causal"), (2, 1, "causal")],
        [(70, 90, "causal"), (0, 3, "tree")],  # padded to the shape of those before
    ):
        segments = batch(rng, shapes, rng.permutation(SLOTS).astype(np.int32))
        keep = all_rows(segments)
        got, expected = static.forward(segments, keep), plain.forward(segments, keep)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        assert static.shapes == [Shape(8, MOST_PROMPT_ROWS, 0, 96)]
        static._captured._met.clear()  # which would be captured itself in time
    long = batch(rng, [(0, 257, "causal")], np.arange(SLOTS, dtype=np.int32))
    static.forward(long, all_rows(long))
    assert static.shapes == [Shape(8, MOST_PROMPT_ROWS, 0, 96)]
