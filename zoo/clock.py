"""The clock that budgets of single-threaded stages are counted on."""

from __future__ import annotations

import time

import torch


def seconds() -> float:
    """Processor time of this process, or wall-clock time where a GPU does the work.

    Whatever else the machine does, a budget in processor time buys the same amount of training.
    """
    return time.monotonic() if torch.cuda.is_available() else time.process_time()
