"""First forwards of a runner, whose cost no request should pay."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from engine.cuda_graphs import MOST_ROWS, GraphedRunner
from engine.padded_segments import MOST_ROWS_PADDED
from engine.runner import ModelRunner, Segment

_log = logging.getLogger(__name__)

# oneDNN compiles a kernel for every number of rows it meets; decoding meets all small ones.
WARM_ROWS = 32
#: Rows of prompts that kernels for weights of eight bits have tiles of their own for.
PROMPT_ROWS = (96, 160)
#: Requests of the batches that are captured beforehand; others are padded to these until they came often.
CAPTURED_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
# Their rows in all, beside one each, and the largest trees of usual budgets.
_CAPTURED_ROWS = (2, 4, 8, 16, *range(32, MOST_ROWS + 1, MOST_ROWS_PADDED))
_MOST_NODES = 16


def warm_up(runner: ModelRunner, numbers: Sequence[int] = range(1, WARM_ROWS + 1)) -> None:
    """Run a forward of each of some numbers of rows, as far as they fit, on slots that hold nothing yet.

    With tensor parallelism all ranks must do so at the same time.
    """
    most = min(runner.num_slots, runner.shape.max_tokens)
    for rows in sorted({min(rows, most) for rows in numbers}):
        runner.forward(_prompts([rows]), np.arange(rows, dtype=np.int32))


def capture(runner: GraphedRunner) -> None:
    """Capture forwards of the batches that decoding meets most, on slots that hold nothing yet.

    Where keys are padded, too, shapes depend on how long the requests' contexts are, and none is captured
    before it is met. With tensor parallelism all ranks must do so at the same time.
    """
    if runner.pads_keys:
        return
    began = time.perf_counter()
    for number, requests in enumerate(CAPTURED_REQUESTS, 1):
        for rows in captured_rows(requests):
            counts = tree_sizes(requests, rows)
            if rows <= runner.num_slots and counts[0] < runner.shape.max_tokens:
                runner.capture(_prompts(counts))
        _log.info(
            "captured forwards of up to %d requests, %d of %d sizes, %d shapes, %.1f s",
            requests,
            number,
            len(CAPTURED_REQUESTS),
            len(runner.shapes),
            time.perf_counter() - began,
        )


def captured_rows(requests: int) -> list[int]:
    """Rows in all of the batches of so many requests: decoding alone, and trees from small to large."""
    most = min(MOST_ROWS, requests * _MOST_NODES)
    return [requests, *(rows for rows in _CAPTURED_ROWS if requests < rows <= most)]


def tree_sizes(requests: int, rows: int) -> list[int]:
    """Rows of each request of a batch of so many in all: as many as it may the first, the others alike."""
    first = min(_MOST_NODES, rows - requests + 1)
    rest = requests - 1
    left = rows - first
    return [first, *(left // rest + (i < left % rest) for i in range(rest))]


def _prompts(counts: Sequence[int]) -> list[Segment]:
    """New requests, one per number, of so many rows."""
    segments, used = [], 0
    for rows in counts:
        numbers = np.arange(rows, dtype=np.int32)
        segments.append(
            Segment(
                tokens=np.zeros(rows, dtype=np.int32),
                positions=numbers,
                slots=numbers + np.int32(used),
                past=np.zeros(0, dtype=np.int32),
            )
        )
        used += rows
    return segments
