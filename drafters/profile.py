"""What drafting costs on this machine, measured for the cost model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from drafters.messages import DraftCall, DraftItem, DraftPlan
from drafters.protocol import Drafter
from engine.sampling_params import RequestSpec, SamplingParams

# (requests, width) of the calls measured.
SHAPES = ((1, 1), (1, 4), (4, 1), (4, 3), (8, 1), (8, 2), (16, 1), (32, 1))
CONTEXTS = (48, 256)
DEPTH = 4


def measure_draft_costs(
    drafter: Drafter,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 5,
) -> list[tuple[int, int, int, float]]:
    """Time draft calls on random prompts.

    Args:
        drafter: the drafter, otherwise idle; it is left without requests.
        shapes: pairs of requests in the call and beam width.
        contexts: prompt lengths, in tokens.
        repeats: calls per shape; the median counts.

    Returns:
        Tuples of requests, rows per layer, context tokens in total, and seconds per layer of the beam.
    """
    rng = np.random.default_rng(0)
    points = []
    call_id = 0
    for context in contexts:
        for num_requests, wanted in shapes:
            width = min(wanted, drafter.capabilities.max_width)
            ids = [f"profile-{i}" for i in range(num_requests)]
            prompts = rng.integers(0, drafter.capabilities.vocab_size, (num_requests, context)).tolist()
            specs = {
                request_id: RequestSpec(
                    request_id=request_id,
                    tokens=prompt,
                    prompt_len=context,
                    sampling=SamplingParams(temperature=0.0),
                )
                for request_id, prompt in zip(ids, prompts, strict=True)
            }
            seconds = []
            for repeat in range(repeats + 2):
                # The first call reads the prompts; the following ones each hear of one more token.
                items = [
                    DraftItem(
                        request_id=request_id,
                        start=0 if repeat == 0 else context + repeat - 1,
                        tokens=np.array([] if repeat == 0 else [repeat], dtype=np.int32),
                        plan=DraftPlan(depth=DEPTH, width=width),
                        spec=specs[request_id] if repeat == 0 else None,
                    )
                    for request_id in ids
                ]
                call_id += 1
                result = drafter.draft(DraftCall(call_id=call_id, items=items))
                if repeat >= 2:
                    seconds.append(result.seconds / DEPTH)
            drafter.draft(DraftCall(call_id=call_id + 1, items=[], release=ids))
            point = (num_requests, num_requests * width, num_requests * context, statistics.median(seconds))
            points.append(point)
    return points
