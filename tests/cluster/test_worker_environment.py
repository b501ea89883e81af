"""What processes of workers see of their node, and what they do before they import torch."""

from __future__ import annotations

import pytest

from cluster.actors import DrafterWorker
from cluster.drafter_config import ModelDrafterConfig
from cluster.process_environment import PROCESS_ENVIRONMENT, worker_environment


@pytest.mark.parametrize("num_gpus", [0.25, 1.0])
def test_ray_says_which_gpus_are_seen_by_who_reserves_some(num_gpus: float) -> None:
    assert worker_environment(num_gpus) == {**PROCESS_ENVIRONMENT, "TORCH_BLAS_PREFER_CUBLASLT": "1"}


def test_whoever_starts_a_cell_may_choose_the_library_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_BLAS_PREFER_CUBLASLT", "0")
    assert worker_environment(1) == {**PROCESS_ENVIRONMENT, "TORCH_BLAS_PREFER_CUBLASLT": "0"}


def test_who_reserves_no_gpu_sees_none() -> None:
    assert worker_environment(0) == {**PROCESS_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}


def test_who_names_no_model_is_told_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("imported first")

    monkeypatch.setattr("cluster.actors._import", never)
    config = ModelDrafterConfig(name="absent", path="/no/such/model")
    with pytest.raises(FileNotFoundError, match="/no/such/model"):
        DrafterWorker().load(config, vocab_size=50, max_tokens=64, target_path="zoo:target-8x384")
