"""Measures what a forward pass of a runner costs by its shape: input of the cost model (design, idea 5)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from engine.devices import synchronize
from engine.heads import DecodingHeads
from engine.runner import ModelRunner, Segment
from engine.sampling_params import RequestSpec, SamplingParams
from verifier.proposing import Asking, propose
from verifier.request_state import RequestState

Int32 = NDArray[np.int32]

# Up to so many rows of a request are measured as a token tree, more as a chunk of its prompt.
MOST_TREE_ROWS = 16
# Contexts lie in runs of so many slots all over the pool, as after some time of serving.
RUN_SLOTS = 8
# Timed forwards per shape that a time limit leaves.
LEAST_REPEATS = 3


def measure_step_costs(
    runner: ModelRunner,
    token_counts: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    *,
    request_counts: Sequence[int] = (1,),
    seed: int = 0,
    cpu_time: bool = False,
    max_seconds: float = float("inf"),
    report: Callable[[int, int], None] = lambda done, total: None,
    then: Callable[[Sequence[Segment]], object] = lambda segments: None,
) -> list[tuple[int, int, int, float]]:
    """Time forwards over random tokens, every row kept, as when trees are verified.

    Overwrites KV slots at will, so it belongs before the first request. The shapes take turns within every
    repeat, in random order: a slow phase of the machine touches all of them, and each finds the caches as
    others left them, as in service.

    Args:
        runner: the model.
        token_counts: rows per forward, over all requests.
        contexts: earlier tokens per request, 0 for none.
        repeats: timed forwards per shape, after one that is not timed.
        request_counts: requests per forward; the rows are spread evenly over them.
        seed: of the random tokens and the order, so that tensor-parallel ranks run the same.
        cpu_time: count processor time of this thread instead of wall time: on a machine with other work
            it is what the forward would take alone. Only for one thread on a CPU.
        max_seconds: stop repeating after so much of that time. Not for tensor-parallel ranks, which must
            repeat alike.
        report: called after every forward with how many are done and how many there are at most.
        then: what every forward is followed by, given its segments; its time counts.

    Returns:
        One (requests, tokens, context of each request, median seconds) per shape. Shapes that the pool
        or the longest sequence cannot hold, or with fewer rows than requests, are left out.
    """
    clock = time.thread_time if cpu_time else time.perf_counter
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
    begun = clock()
    for repeat in range(repeats + 1):
        if repeat > LEAST_REPEATS and clock() - begun > max_seconds:
            break
        for done, i in enumerate(rng.permutation(len(shapes))):
            segments, keep = forwards[i]
            start = clock()
            logits = runner.forward(segments, keep)
            then(segments)
            synchronize(logits.device)
            if repeat > 0:
                seconds[i].append(clock() - start)
            report(repeat * len(shapes) + done + 1, (repeats + 1) * len(shapes))
    return [(*shape, statistics.median(times)) for shape, times in zip(shapes, seconds, strict=True)]


def _fits(runner: ModelRunner, requests: int, tokens: int, context: int) -> bool:
    return (
        requests <= tokens
        and requests * context + tokens <= runner.num_slots // RUN_SLOTS * RUN_SLOTS
        and context + -(-tokens // requests) <= runner.shape.max_tokens
    )


def _segments(
    runner: ModelRunner, rng: np.random.Generator, requests: int, tokens: int, context: int
) -> tuple[list[Segment], Int32]:
    """Requests all over the pool, each with its context and a tree of its rows, or a chunk of its prompt."""
    runs = np.arange(runner.num_slots // RUN_SLOTS * RUN_SLOTS, dtype=np.int32).reshape(-1, RUN_SLOTS)
    slots = rng.permutation(runs).reshape(-1)
    segments = []
    first = 0
    for share in np.array_split(np.arange(tokens), requests):
        rows = len(share)
        own = slots[first : first + context + rows]
        offsets = np.arange(rows, dtype=np.int32)
        visible = None
        if 1 < rows <= MOST_TREE_ROWS:  # a root and its children
            visible = np.eye(rows, dtype=np.bool_)
            visible[:, 0] = True
            offsets = np.minimum(offsets, 1)
        segments.append(
            Segment(
                tokens=rng.integers(0, runner.shape.vocab_size, rows, dtype=np.int32),
                positions=offsets + np.int32(context),
                slots=own[context:],
                past=own[:context],
                visible=visible,
            )
        )
        first += context + rows
    return segments, np.arange(tokens, dtype=np.int32)


def measure_head_costs(
    runner: ModelRunner,
    heads: DecodingHeads,
    request_counts: Sequence[int] = (1, 2, 4, 8, 16, 32),
    repeats: int = 9,
    *,
    cpu_time: bool = False,
) -> list[tuple[int, int, int, float]]:
    """Time evaluating decoding heads for requests that decode greedily; with tensor parallelism on all ranks.

    Overwrites KV slots at will, as `measure_step_costs`.

    Args:
        runner: the target.
        heads: its heads.
        request_counts: requests whose heads are evaluated together.
        repeats: timed evaluations per count, after one that is not timed.
        cpu_time: as of `measure_step_costs`.

    Returns:
        Tuples of requests, rows of the beam, context tokens in total, and median seconds per head: a draft
        has a layer per head, and the cost model counts in layers. Heads cost the same whatever beam is grown
        on them and however long the contexts are, so each time measured stands there for several of both.
    """
    clock = time.thread_time if cpu_time else time.perf_counter
    greedy = SamplingParams(temperature=0.0, max_tokens=1 << 20)
    spec = RequestSpec(request_id="profile", tokens=[0], prompt_len=1, sampling=greedy)
    costs = []
    for n in [count for count in request_counts if count <= runner.num_slots]:
        asking = [Asking(RequestState(spec, runner.shape), [0], row, 4) for row in range(n)]
        numbers, zero = np.arange(n, dtype=np.int32), np.zeros(1, dtype=np.int32)
        rows = [Segment(zero, zero, numbers[i : i + 1], zero[:0]) for i in range(n)]
        seconds = []
        for _ in range(repeats + 1):
            synchronize(runner.forward(rows, numbers).device)
            start = clock()
            propose(heads, asking)
            seconds.append(clock() - start)
        each = statistics.median(seconds[1:]) / heads.num_heads
        costs += [(n, width * n, n * context, each) for width, context in product((1, 4), (32, 320))]
    return costs
