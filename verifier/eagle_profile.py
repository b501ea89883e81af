"""Measures what EAGLE's layer costs beside a target: reading what was verified, and drafting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import product

import numpy as np

from engine.devices import synchronize
from engine.runner import ModelRunner, Segment
from engine.sampling_params import RequestSpec, SamplingParams
from verifier.eagle_drafts import EagleDrafts
from verifier.proposing import Asking, Read
from verifier.request_state import RequestState

# Of a tree so many rows are kept, and so read, in the usual step: the root and what was accepted.
KEPT_ROWS = 3
# Layers of the drafts that are timed.
_DEPTH = 4


def read_after(drafts: EagleDrafts, segments: Sequence[Segment]) -> None:
    """Read what would be kept of a forward of these segments: all of a prompt's rows, a few of a tree's."""
    reads: list[Read] = []
    first = 0
    for segment in segments:
        kept = len(segment.tokens) if segment.visible is None else min(KEPT_ROWS, len(segment.tokens))
        rows = np.arange(kept, dtype=np.int32)
        reads.append(
            Read(
                request_id=str(len(reads)),
                rows=rows + np.int32(first),
                tokens=segment.tokens[:kept],
                positions=segment.positions[:1] + rows,
                slots=segment.slots[:kept],
                past=segment.past,
            )
        )
        first += len(segment.tokens)
    drafts.read(reads, is_asked=True)


def measure_eagle_costs(
    runner: ModelRunner,
    drafts: EagleDrafts,
    request_counts: Sequence[int] = (1, 2, 4, 8, 16, 32),
    widths: Sequence[int] = (1, 4),
    contexts: Sequence[int] = (32, 320),
    repeats: int = 5,
    *,
    cpu_time: bool = False,
) -> list[tuple[int, int, int, float]]:
    """Time drafting for requests that decode greedily; with tensor parallelism on all ranks.

    Overwrites KV slots at will, so it belongs before the first request.

    Args:
        runner: the target.
        drafts: on it.
        request_counts: requests drafted for together.
        widths: of the beams.
        contexts: tokens of each request; fewer where the pool or the longest sequence holds no more.
        repeats: timed drafts per shape, after one that is not timed.
        cpu_time: as of `verifier.profile.measure_step_costs`.

    Returns:
        Tuples of requests, rows of a layer, context tokens in total, and median seconds per layer.
    """
    clock = time.thread_time if cpu_time else time.perf_counter
    greedy = SamplingParams(temperature=0.0, max_tokens=1 << 20)
    state = RequestState(
        RequestSpec(request_id="profile", tokens=[0], prompt_len=1, sampling=greedy), runner.shape
    )
    costs = []
    longest = runner.shape.max_tokens - _DEPTH - 1
    # Shortened and not left out: else a small pool leaves fewer points than a cost has coefficients.
    shapes = dict.fromkeys(
        (n, width, min(context, longest, runner.num_slots // n - 1))
        for n, width, context in product(request_counts, widths, contexts)
    )
    for n, width, context in shapes:
        if context < 1:
            continue
        slots = np.arange(n * (context + 1), dtype=np.int32).reshape(n, -1)
        zero = np.zeros(1, dtype=np.int32)
        segments = [Segment(zero, zero + np.int32(context), line[-1:], line[:-1]) for line in slots]
        asking = [Asking(state, [0], row, width, _DEPTH, row) for row in range(n)]
        seconds = []
        for _ in range(repeats + 1):
            runner.forward(segments, np.arange(n, dtype=np.int32))
            read_after(drafts, segments)
            synchronize(drafts.device)
            start = clock()
            drafts.propose(asking)()
            seconds.append(clock() - start)
        costs.append((n, width * n, n * context, statistics.median(seconds[1:]) / _DEPTH))
    return costs
