"""First draft calls of a model on a GPU: kernels for usual shapes are compiled before requests need them."""

from __future__ import annotations

import itertools
import logging
import time

import numpy as np

from drafters.messages import DraftCall, DraftItem, DraftPlan
from drafters.protocol import Drafter
from engine.sampling_params import RequestSpec, SamplingParams

_log = logging.getLogger(__name__)

#: Beams that are drafted beforehand; others compile when they come.
WIDTHS = (1, 2, 4)
# The device grows one layer less: 1, 2, 4 and 8. Masks are compiled for powers of two of columns.
_DEPTHS = (2, 3, 5, 9)
# Numbers of stop tokens: powers of two, too.
_STOPS = (1, 2)
_PROMPT = 4


def draft_first(drafter: Drafter) -> None:
    """Draft for requests of no consequence; the drafter, otherwise idle, is left without them."""
    began = time.perf_counter()
    shapes = [
        (width, depth, stops)
        for width, depth, stops in itertools.product(WIDTHS, _DEPTHS, _STOPS)
        if width > 1 or depth == _DEPTHS[0]  # chains have no masks
    ]
    for number, (width, depth, stops) in enumerate(shapes):
        sampling = SamplingParams(
            temperature=number % 2,  # sampled ones take kernels of their own
            logit_bias={0: 0.0},  # else their layers may be captured, which takes other kernels
            top_p=0.9,
            max_tokens=1000,
            stop_token_ids=tuple(range(stops)),
        )
        spec = RequestSpec(
            request_id="first", tokens=list(range(_PROMPT)), prompt_len=_PROMPT, sampling=sampling
        )
        item = DraftItem(
            request_id="first",
            start=0,
            tokens=np.zeros(0, dtype=np.int32),
            plan=DraftPlan(depth=depth, width=width),
            spec=spec,
        )
        drafter.draft(DraftCall(call_id=0, items=[item]))
    drafter.draft(DraftCall(call_id=0, items=[], release=["first"]))
    seconds = time.perf_counter() - began
    _log.info("kernels for drafts of %d usual shapes are compiled, %.1f s", len(shapes), seconds)
