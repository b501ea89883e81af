"""Tests that need a GPU: skipped without one. `scripts/gpu_session.sh` runs them on one (docs/gpu.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks them, and skips them where there is no GPU."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="CUDA is not available"))


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)
