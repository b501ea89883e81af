"""Captures that fail, and what is left of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.cuda_graphs import GraphedRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from tests.engine.test_static_forwards import batch


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "Triton Error [CUDA]: out of memory"])
def test_a_driver_without_memory_for_a_graph_or_a_kernel_leaves_the_ordinary_way(
    message: str, target: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch does not allocate itself is not reported as its `OutOfMemoryError`; and where the end of a
    capture fails, torch does not go back to the stream of before."""
    stream, graph, current = torch.cuda.stream, torch.cuda.graph, [torch.cuda.current_stream()]

    @contextlib.contextmanager
    def entered(of: torch.cuda.Stream) -> Iterator[None]:
        before, current[0] = current[0], of
        with stream(of):
            try:
                yield
            finally:
                current[0] = before

    @contextlib.contextmanager
    def full(*args: Any, stream: torch.cuda.Stream, **options: Any) -> Iterator[None]:
        with graph(*args, stream=stream, **options):
            yield
        current[0] = stream
        raise RuntimeError(message)

    weights = load_llama_weights(AutoModelForCausalLM.from_pretrained(target).eval(), device=cuda)
    plain = LlamaRunner(weights, 1000, "padded")
    static = GraphedRunner(LlamaRunner(weights, 1001, "padded"), capture_at=1)
    segments = batch(np.random.default_rng(0), [(5, 3, "causal")], np.arange(1000, dtype=np.int32))
    keep = np.arange(3, dtype=np.int32)
    with monkeypatch.context() as patch:
        usual = current[0]
        patch.setattr(torch.cuda, "current_stream", lambda *_: current[0])
        patch.setattr(torch.cuda, "stream", entered)
        patch.setattr(torch.cuda, "graph", full)
        got = static.forward(segments, keep)
        assert current[0] is usual
    torch.testing.assert_close(got, plain.forward(segments, keep), atol=1e-3, rtol=1e-2)
    static.forward(segments, keep)
    assert static.shapes == []  # nor later
