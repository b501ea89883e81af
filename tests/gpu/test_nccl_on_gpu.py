"""What one GPU shows of NCCL: a group of one rank, whose sums are those of no group, captured ones too."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine import tensor_parallel
from engine.cuda_graphs import GraphedRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from tests.emulated_cuda import IS_NEEDED
from tests.engine import tiny_models
from tests.engine.test_runners import logits_of

pytestmark = pytest.mark.skipif(IS_NEEDED, reason="needs a GPU: NCCL has no other")
SLOTS = 256


@pytest.fixture
def group(cuda: torch.device) -> Iterator[torch.distributed.ProcessGroup]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    tensor_parallel.join(0, 1, "127.0.0.1", port, device=cuda)
    world = torch.distributed.group.WORLD
    assert world is not None
    yield world
    tensor_parallel.leave()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_nccl_are_part_of_forwards(
    dtype: torch.dtype, group: torch.distributed.ProcessGroup, cuda: torch.device
) -> None:
    """Twice the same session: captured sums are replayed with what there is to sum then."""
    weights = load_llama_weights(tiny_models.build("llama").to(dtype), device=cuda)
    assert torch.distributed.get_backend(group) == "nccl"
    sharded = GraphedRunner(LlamaRunner(replace(weights, group=group), SLOTS + 1), capture_at=1)
    tensor_parallel.end_loading()
    alone = LlamaRunner(weights, SLOTS)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    for seed in (0, 1):
        expected = logits_of(alone, seed)
        found = logits_of(sharded, seed)
        assert sharded.shapes
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
