"""First forwards of a runner, whose cost no request should pay."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from engine.cuda_graphs import MOST_ROWS, GraphedRunner
from engine.padded_segments import MOST_PROMPT_ROWS, MOST_ROWS_PADDED
from engine.runner import ModelRunner, Segment

_log = logging.getLogger(__name__)

#: oneDNN compiles a kernel for every number of rows it meets; decoding meets all small ones.
WARM_ROWS = 32
#: Rows of prompts that kernels for weights of eight bits have tiles of their own for.
PROMPT_ROWS = (96, 160)
#: Requests of the batches that are captured beforehand; others are padded to these until they came often.
CAPTURED_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
# Rows in all, beside one for each request; and the largest trees of usual budgets.
_CAPTURED_ROWS = (2, 4, 8, 16, *range(32, MOST_ROWS + 1, MOST_ROWS_PADDED))
_MOST_NODES = 16
#: Requests, at most, of the batches with a prompt that are captured beforehand.
CAPTURED_WITH_PROMPT = (1, 4, 16, 32, 64)
# Lines in the log while capturing.
_REPORTS = 4


def warm_up(runner: ModelRunner, numbers: Sequence[int] | None = None) -> None:
    """Run a forward of each of some numbers of rows, as far as they fit, on slots that hold nothing yet.

    By default of all up to `WARM_ROWS`.

    With tensor parallelism all ranks must do so at the same time.
    """
    most = min(runner.num_slots, runner.shape.max_tokens)
    for rows in sorted({min(rows, most) for rows in numbers or range(1, WARM_ROWS + 1)}):
        runner.forward(new_requests([rows]), np.arange(rows, dtype=np.int32))


def capture(runner: GraphedRunner, *, is_alone: bool = True) -> None:
    """Capture forwards of the batches that decoding meets most, on slots that hold nothing yet.

    The largest first, so that the others find room in what it took. Where keys are padded, too, shapes depend
    on how long the requests' contexts are, and none is captured before it is met.

    Args:
        runner: whose.
        is_alone: without other ranks, which must do the same at the same time. Only then memory may run out:
            what is left is not captured.
    """
    if runner.pads_keys:
        return
    batches = usual_batches(is_rectangle=runner.pads_rows)
    began = time.perf_counter()
    for number, counts in enumerate(batches, 1):
        if sum(counts) <= runner.num_slots and max(counts) < runner.shape.max_tokens:
            try:
                runner.capture(new_requests(counts))
            except torch.cuda.OutOfMemoryError:
                if not is_alone:
                    raise
                _log.warning("memory is left for %d captured forwards only", len(runner.shapes))
                return
        if number * _REPORTS // len(batches) > (number - 1) * _REPORTS // len(batches):
            seconds = time.perf_counter() - began
            _log.info("captured forwards of %d of %d usual batches, %.1f s", number, len(batches), seconds)


def usual_batches(*, is_rectangle: bool) -> list[list[int]]:
    """Rows per request of the batches that are captured, those with the most rows first.

    Decoding alone, trees from small to large of up to 16 nodes, and prompts, alone and beside others. These
    not if `is_rectangle`, where requests have equally many rows in a captured forward.
    """
    found = []
    for most in CAPTURED_REQUESTS:
        if is_rectangle:
            # Numbers of requests are rounded up to multiples of 8 there.
            steps = range(most // 2 + 8, most + 1, 8) if most > 8 else (most,)
            found += [[rows] * number for number in steps for rows in (1, 2, 4, 8, _MOST_NODES)]
            continue
        found.append([1] * most)
        if most > _MOST_NODES:  # as many rows as that, in one tree and many requests without
            found.append([_MOST_NODES, *[1] * (most - _MOST_NODES)])
        rows_in_all = [rows for rows in _CAPTURED_ROWS if most < rows <= most * _MOST_NODES]
        found += [tree_sizes(most, rows) for rows in rows_in_all]
    if not is_rectangle:
        for most in CAPTURED_WITH_PROMPT:
            others = most // 2  # the fewest that count as so many, beside the longest prompt for the rows
            prompts = [
                rows - others for rows in range(MOST_ROWS_PADDED, MOST_PROMPT_ROWS + 1, MOST_ROWS_PADDED)
            ]
            found += [[rows, *[1] * others] for rows in prompts if rows > _MOST_NODES]
    # Of those with as many rows in all, few of one request come first: batches are padded to the first.
    usual = [counts for counts in found if sum(counts) <= MOST_ROWS]
    return sorted(usual, key=lambda counts: (sum(counts), -max(counts)), reverse=True)


def tree_sizes(requests: int, rows: int) -> list[int]:
    """Rows of each request of a batch of so many in all: as many as it may the first, the others alike."""
    first = min(_MOST_NODES, rows - requests + 1)
    rest = requests - 1
    left = rows - first
    return [first, *(left // rest + (i < left % rest) for i in range(rest))]


def new_requests(counts: Sequence[int]) -> list[Segment]:
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
