"""What processes of workers see of their node."""

from __future__ import annotations

import pytest

from cluster.actors import WORKER_ENV, worker_environment


@pytest.mark.parametrize("num_gpus", [0.25, 1.0])
def test_ray_says_which_gpus_are_seen_by_who_reserves_some(num_gpus: float) -> None:
    assert worker_environment(num_gpus) == WORKER_ENV


def test_who_reserves_no_gpu_sees_none() -> None:
    assert worker_environment(0) == {**WORKER_ENV, "CUDA_VISIBLE_DEVICES": ""}
