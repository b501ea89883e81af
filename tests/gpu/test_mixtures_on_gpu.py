"""Mixtures of experts on a GPU: captured by the lean runner, and equal to a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cuda_graphs import GraphedRunner
from engine.experts import FeedForward, SeparateExperts
from engine.fp8 import quantized
from engine.grouped_experts import MOST_AT_ONCE, GroupedExperts, TritonRouter
from engine.linear import Linear
from engine.llama_runner import LlamaRunner
from engine.loading import load_runner
from engine.mixture import TopRouter
from engine.runner import ModelRunner
from tests import emulated_cuda
from tests.engine import tiny_models
from tests.gpu.test_windows_on_gpu import SLOTS, batch, prompts

NAMES = ["mixtral", *([] if emulated_cuda.IS_NEEDED else ["qwen2_moe", "qwen3_moe"])]


@pytest.mark.parametrize("name", NAMES)
def test_captured_forwards_are_those_of_a_cpu(
    name: str, tmp_path: Path, cuda: torch.device, emulation: emulated_cuda.Emulation | None
) -> None:
    directory = tiny_models.write(name, tmp_path)
    made: list[ModelRunner] = [
        load_runner(directory, num_slots=SLOTS, device=device, self_test=not emulated_cuda.IS_NEEDED)
        for device in ("cuda", "cpu")
    ]
    there, here = made
    assert isinstance(there, GraphedRunner)
    assert isinstance(there._runner, LlamaRunner)
    assert isinstance(here, LlamaRunner)
    there._captured._capture_at = there._captured._capture_at_beside = 1
    before = len(emulation.launches) if emulation else 0
    for runner in made:
        runner.forward(prompts(), np.zeros(1, dtype=np.int32))
    keep = np.arange(4, dtype=np.int32)
    for shift in (0, 3):  # captured, and replayed where rows are sent elsewhere
        expected = here.forward(batch(shift), keep)
        got = there.forward(batch(shift), keep)
        torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=1e-3)
    assert there.shapes
    if emulation:
        assert {"route", "group", "gate_and_up", "down", "add_up"} <= set(emulation.launches[before:])


@pytest.mark.parametrize("in_eight_bits", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "per_row", "rows", "hidden", "units"),
    [(5, 2, 3, 40, 24)]
    if emulated_cuda.IS_NEEDED
    else [
        (128, 8, 1, 2048, 768),  # Qwen3-30B-A3B
        (128, 8, 64, 2048, 768),
        (128, 8, MOST_AT_ONCE // 4, 2048, 768),
        (8, 2, 33, 512, 1792),
        (60, 4, 300, 256, 100),
    ],
)
def test_experts_all_at_once_are_each_by_itself(
    num_experts: int,
    per_row: int,
    rows: int,
    hidden: int,
    units: int,
    in_eight_bits: bool,
    cuda: torch.device,
) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if emulated_cuda.IS_NEEDED else torch.bfloat16  # see `tests.emulated_cuda`

    # All on the GPU: drawn, laid out and multiplied by a CPU, the largest take it minutes.
    def floats(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=cuda).mul_(size[-1] ** -0.5).to(dtype)

    gate_up, down = floats(num_experts, 2 * units, hidden), floats(num_experts, hidden, units)
    x, weight = floats(rows, hidden).mul_(hidden**0.5), floats(num_experts, hidden)
    chosen, weights = TritonRouter(weight, per_row, sums_to_one=True)(x)
    by_torch = TopRouter(weight, per_row, sums_to_one=True)(x)
    torch.testing.assert_close(weights, by_torch[1])
    if in_eight_bits:
        of_gate_up, of_down = ([quantized(one) for one in each] for each in (gate_up, down))
        experts = GroupedExperts(of_gate_up, of_down, dtype)
        gate_up, down = (
            torch.stack([one.dequantized(torch.float32) for one in each]) for each in (of_gate_up, of_down)
        )
    else:
        experts = GroupedExperts([*gate_up], [*down], dtype)
    got = experts(x, chosen, weights)
    alone = SeparateExperts(
        [FeedForward(Linear(a.float()), Linear(b.float())) for a, b in zip(gate_up, down, strict=True)]
    )
    expected = alone(x.float(), chosen.long(), weights)
    torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)
