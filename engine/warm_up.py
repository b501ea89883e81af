"""First forwards of a runner, whose cost no request should pay."""

from __future__ import annotations

import numpy as np

from engine.runner import ModelRunner, Segment

# oneDNN compiles a kernel for every number of rows it meets; decoding meets all small ones.
WARM_ROWS = 32


def warm_up(runner: ModelRunner) -> None:
    """Run a forward of each small number of rows, on slots that hold nothing yet.

    With tensor parallelism all ranks must do so at the same time.
    """
    most = min(WARM_ROWS, runner.num_slots, runner.shape.max_tokens)
    for rows in range(1, most + 1):
        numbers = np.arange(rows, dtype=np.int32)
        segment = Segment(
            tokens=np.zeros(rows, dtype=np.int32),
            positions=numbers,
            slots=numbers,
            past=np.zeros(0, dtype=np.int32),
        )
        runner.forward([segment], numbers)
