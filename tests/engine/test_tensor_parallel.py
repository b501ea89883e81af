"""A model over two processes gives the logits of one process, and the same on both ranks."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.loading import RunnerKind, UnsupportedModel, load_runner
from engine.tensor_parallel import check_divisible, end_loading
from tests.engine import fp8_models, tiny_models
from tests.engine.ranks import on_two_ranks
from tests.engine.test_runners import logits_of

CASES: list[tuple[str, RunnerKind]] = [("llama_bias", "lean"), ("qwen3", "hf"), ("fp8", "lean")]


def _logits(rank: int, directories: list[str]) -> list[tuple[list[np.ndarray], int]]:
    outputs = []
    for directory, (_, runner) in zip(directories, CASES, strict=True):
        loaded = load_runner(directory, num_slots=128, runner=runner, tensor_parallel=(rank, 2))
        logits = [out.numpy() for out in logits_of(loaded, 1)]
        outputs.append((logits, loaded.shape.kv_bytes_per_token))
    return outputs


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    directories = [str(tiny_models.write(name, tmp_path / name)) for name, _ in CASES[:2]]
    directories.append(str(fp8_models.write("qwen3", "fine-grained", tmp_path / "fp8")))
    by_rank = on_two_ranks(_logits, directories)
    for index, (directory, (_, runner)) in enumerate(zip(directories, CASES, strict=True)):
        alone = load_runner(directory, num_slots=128, runner=runner)
        (first, first_bytes), (second, _) = by_rank[0][index], by_rank[1][index]
        assert first_bytes * 2 == alone.shape.kv_bytes_per_token
        for zero, one, expected in zip(first, second, logits_of(alone, 1), strict=True):
            assert np.array_equal(zero, one)
            torch.testing.assert_close(torch.from_numpy(zero), expected, atol=1e-4, rtol=0)


def _alone(rank: int, directories: list[str]) -> tuple[float, str]:
    group = torch.distributed.group.WORLD
    assert group is not None
    patience_s = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    if rank == 1:
        time.sleep(2)  # there, but elsewhere
        return patience_s, ""
    end_loading(0.3)
    try:
        torch.distributed.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return patience_s, str(error)
    return patience_s, "not alone"


def test_ranks_wait_long_for_each_other_while_they_load_and_not_after() -> None:
    (first_s, failure), (second_s, _) = on_two_ranks(_alone, [])
    assert first_s == second_s == 1800
    assert "Timed out" in failure


def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    directory = tiny_models.write("llama_odd", tmp_path)
    with pytest.raises(UnsupportedModel, match="3 attention heads cannot be divided over 2 ranks"):
        load_runner(directory, num_slots=64, tensor_parallel=(0, 2))
    with pytest.raises(UnsupportedModel, match="1 key-value heads"):
        check_divisible(tiny_models.build("llama_odd").config, 3)
