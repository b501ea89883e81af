"""What drafting costs on this machine, measured for the cost model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from drafters.messages import DraftCall, DraftItem, DraftPlan
from drafters.protocol import Drafter
from engine.sampling_params import RequestSpec, SamplingParams

REQUEST_COUNTS = (1, 4, 16)
WIDTHS = (1, 2, 4)
CONTEXTS = (32, 256)
DEPTH = 4
# Timed calls per shape that a time limit leaves.
LEAST_REPEATS = 3


def measure_draft_costs(
    drafter: Drafter,
    request_counts: Sequence[int] = REQUEST_COUNTS,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 5,
    *,
    cpu_time: bool = False,
    max_seconds: float = float("inf"),
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[int, float, int, float]]:
    """Time draft calls on random prompts, each of which hears of another next token with every call.

    The shapes take turns within every repeat, in random order: a slow phase of the machine touches all of
    them, and each finds the caches as others left them, as in service.

    Args:
        drafter: the drafter, otherwise idle; it is left without requests.
        request_counts: requests in the call.
        widths: of the beam; wider ones than the drafter's are its widest.
        contexts: prompt lengths, in tokens.
        repeats: calls per shape after one that is not timed; the median counts.
        cpu_time: count processor time of this thread instead of wall time; for a drafter on one CPU thread.
        max_seconds: stop repeating after so much of that time.
        report: called after every call with how many are done and how many there are at most.

    Returns:
        Tuples of requests, mean rows per forward, context tokens in total, and seconds per forward, of which
        a call has one per layer of the beam: the first over one row per request. Prompts that the drafter
        cannot hold beside the others are left out.
    """
    clock = time.thread_time if cpu_time else time.perf_counter
    widths = sorted({min(width, drafter.capabilities.max_width) for width in widths})
    rng = np.random.default_rng(0)
    held = _open(drafter, rng, request_counts, contexts, max(widths))
    shapes = [
        (context, count, width)
        for context, ids in held.items()
        for count in request_counts
        if count <= len(ids)
        for width in widths
    ]
    seconds: list[list[float]] = [[] for _ in shapes]
    begun, call_id = clock(), 0
    for repeat in range(repeats + 1):
        if repeat > LEAST_REPEATS and clock() - begun > max_seconds:
            break
        for done, i in enumerate(rng.permutation(len(shapes))):
            context, count, width = shapes[i]
            plan = DraftPlan(depth=DEPTH, width=width)
            call_id += 1  # and a token unlike those before, for which nothing was computed in advance
            new = np.array([call_id % drafter.capabilities.vocab_size], dtype=np.int32)
            items = [_item(request_id, plan, context, new) for request_id in held[context][:count]]
            start = clock()
            drafter.draft(DraftCall(call_id=call_id, items=items))
            if repeat > 0:
                seconds[i].append((clock() - start) / DEPTH)
            report(repeat * len(shapes) + done + 1, (repeats + 1) * len(shapes))
    release = [request_id for ids in held.values() for request_id in ids]
    drafter.draft(DraftCall(call_id=0, items=[], release=release))
    return [
        (count, count * (1 + (DEPTH - 1) * width) / DEPTH, count * context, statistics.median(times))
        for (context, count, width), times in zip(shapes, seconds, strict=True)
    ]


def _open(
    drafter: Drafter,
    rng: np.random.Generator,
    request_counts: Sequence[int],
    contexts: Sequence[int],
    width: int,
) -> dict[int, list[str]]:
    """By context, the requests the drafter has read: as many as the largest call, or as it can hold."""
    capabilities = drafter.capabilities
    room = capabilities.num_slots or 1 << 40
    held: dict[int, list[str]] = {}
    for context in contexts:
        each = context + (DEPTH + 1) * width
        count = min(max(request_counts), room // each) if each <= capabilities.max_tokens else 0
        room -= count * each
        held[context] = [f"profile-{context}-{i}" for i in range(count)]
        for request_id in held[context]:
            spec = RequestSpec(
                request_id=request_id,
                tokens=rng.integers(0, capabilities.vocab_size, context).tolist(),
                prompt_len=context,
                sampling=SamplingParams(temperature=0.0, max_tokens=1_000_000),
            )
            item = _item(request_id, DraftPlan(depth=0), 0, np.zeros(0, dtype=np.int32), spec)
            drafter.draft(DraftCall(call_id=0, items=[item]))
    return held


def _item(
    request_id: str, plan: DraftPlan, start: int, tokens: NDArray[np.int32], spec: RequestSpec | None = None
) -> DraftItem:
    return DraftItem(request_id=request_id, start=start, tokens=tokens, plan=plan, spec=spec)
