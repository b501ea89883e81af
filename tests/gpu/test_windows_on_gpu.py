"""Models with windows and sinks on a GPU: captured, and on the device's own trees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cuda_graphs import GraphedRunner
from engine.hf_runner import HFRunner
from engine.loading import load_runner
from engine.runner import ModelRunner, Segment
from engine.triton_attention import TritonAttention
from tests.engine import tiny_models

SLOTS = 160
#: Tokens before the forward that is compared; the window is of 64.
NUM_PAST = 70


def batch(shift: int) -> list[Segment]:
    """A decoded row behind the window, a tree behind it, and one within it."""
    slots = np.arange(SLOTS, dtype=np.int32)
    visible = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=np.bool_)
    at = NUM_PAST - 4 + shift
    return [
        Segment(slots[9:10], slots[at : at + 1], slots[at : at + 1], slots[:at]),
        Segment(
            slots[5:8], slots[[at, at + 1, at + 1]], slots[80 + at : 83 + at], slots[80 : 80 + at], visible
        ),
    ]


def prompts() -> list[Segment]:
    numbers = np.arange(NUM_PAST, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(3, tiny_models.VOCABULARY, NUM_PAST).astype(np.int32)
    return [Segment(tokens, numbers, numbers + first, numbers[:0]) for first in (0, 80)]


@pytest.mark.parametrize("name", ["mistral_window", "gemma3_window"])
def test_captured_forwards_are_those_of_a_cpu(name: str, tmp_path: Path, cuda: torch.device) -> None:
    directory = tiny_models.write(name, tmp_path)
    made: list[ModelRunner] = [
        load_runner(directory, num_slots=SLOTS, runner="hf", device=device, self_test=False)
        for device in ("cuda", "cpu")
    ]
    there, here = made
    assert isinstance(there, GraphedRunner)
    assert isinstance(here, HFRunner)
    assert isinstance(there._runner.attention, TritonAttention)
    there._captured._capture_at = there._captured._capture_at_beside = 1
    for runner in made:
        runner.forward(prompts(), np.zeros(1, dtype=np.int32))
    keep = np.arange(4, dtype=np.int32)
    for shift in (0, 3):  # captured, and replayed where more keys are
        expected = here.forward(batch(shift), keep)
        got = there.forward(batch(shift), keep)
        torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=1e-3)
    assert there.shapes
