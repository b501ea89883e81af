"""Who makes the host wait for a GPU, real or emulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from engine.devices import Transfer

Found = TypeVar("Found")


def arriving_once(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Found]) -> Found:
    """What `run` returns; it waits for one transfer that went on meanwhile, and for nothing else."""
    transfers = []
    wait = Transfer.wait

    def counted(transfer: Transfer) -> torch.Tensor:
        transfers.append(transfer)
        return wait(transfer)

    monkeypatch.setattr(Transfer, "wait", counted)
    found = never_waiting(run)
    assert len(transfers) == 1
    return found


def never_waiting(run: Callable[[], Found]) -> Found:
    """What `run` returns; it waits for events, and nowhere else."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
