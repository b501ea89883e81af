"""Tests that need a GPU; without one they run on an emulated device (docs/gpu.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.emulated_cuda import emulated_cuda


@pytest.fixture(scope="module", autouse=True)
def emulation() -> Iterator[None]:
    """Of a GPU where there is none."""
    if torch.cuda.is_available():
        yield
        return
    with emulated_cuda():
        yield


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)
