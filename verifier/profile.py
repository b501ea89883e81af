"""Measures what a forward pass of a runner costs by its shape: input of the cost model (design, idea 5)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.runner import ModelRunner, Segment

Int32 = NDArray[np.int32]


def measure_step_costs(
    runner: ModelRunner,
    token_counts: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    *,
    request_counts: Sequence[int] = (1,),
    seed: int = 0,
) -> list[tuple[int, int, int, float]]:
    """Time forwards over random tokens, every row kept, as when trees are verified.

    Overwrites KV slots at will, so it belongs before the first request. The shapes take turns within
    every repeat: a slow phase of the machine then touches all of them, not one.

    Args:
        runner: the model.
        token_counts: rows per forward, over all requests.
        contexts: earlier tokens per request, 0 for none.
        repeats: timed forwards per shape, after one that is not timed.
        request_counts: requests per forward; the rows are spread evenly over them.
        seed: of the random tokens, so that tensor-parallel ranks run the same.

    Returns:
        One (requests, tokens, context of each request, median seconds) per shape. Shapes that the pool
        or the longest sequence cannot hold, or with fewer rows than requests, are left out.
    """
    rng = np.random.default_rng(seed)
    shapes = [
        (requests, tokens, context)
        for requests in request_counts
        for tokens in token_counts
        for context in contexts
        if _fits(runner, requests, tokens, context)
    ]
    forwards = [_segments(runner, rng, *shape) for shape in shapes]
    seconds: list[list[float]] = [[] for _ in shapes]
    for repeat in range(repeats + 1):
        for i, (segments, keep) in enumerate(forwards):
            start = time.perf_counter()
            logits = runner.forward(segments, keep)
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
            if repeat > 0:
                seconds[i].append(time.perf_counter() - start)
    return [(*shape, statistics.median(times)) for shape, times in zip(shapes, seconds, strict=True)]


def _fits(runner: ModelRunner, requests: int, tokens: int, context: int) -> bool:
    return (
        requests <= tokens
        and requests * context + tokens <= runner.num_slots
        and context + -(-tokens // requests) <= runner.shape.max_tokens
    )


def _segments(
    runner: ModelRunner, rng: np.random.Generator, requests: int, tokens: int, context: int
) -> tuple[list[Segment], Int32]:
    """Requests side by side in the pool, each its context followed by its rows."""
    segments = []
    first = 0
    for share in np.array_split(np.arange(tokens), requests):
        rows = len(share)
        slots = np.arange(first, first + context + rows, dtype=np.int32)
        segments.append(
            Segment(
                tokens=rng.integers(0, runner.shape.vocab_size, rows, dtype=np.int32),
                positions=np.arange(context, context + rows, dtype=np.int32),
                slots=slots[context:],
                past=slots[:context],
            )
        )
        first += context + rows
    return segments, np.arange(tokens, dtype=np.int32)
