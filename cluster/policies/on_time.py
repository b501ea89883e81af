"""How many requests steps of some length keep on time: what a longer step costs in objectives."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.policies.base import DecodeRequest
from cluster.policies.decode_batch import MOST_CERTAIN_RATE
from cluster.policies.horizon import time_ahead


def num_on_time(batch: Iterable[DecodeRequest], step_s: float, depth: int) -> int:
    """Requests whose TPOT objective holds over their horizon if all steps are like this one.

    A step of `step_s` seconds brings a request `(1 - a^(k+1)) / (1 - a)` expected tokens, where `a` is its
    acceptance rate and `k` the drafts it can have, at most `depth`. Its next tokens, as many as
    `horizon.required_tokens` looks ahead, must come before its objective says that they are late.

    Args:
        batch: requests; those without an objective do not count.
        step_s: seconds of a step.
        depth: of the drafts in it; 0 for plain decoding.
    """
    count = 0
    for request in batch:
        if request.tpot_s is None:
            continue
        tokens, most = 1.0, min(depth, request.max_draft)
        if most > 0 and request.drafter:
            rate = min(request.rate, MOST_CERTAIN_RATE)
            tokens = (1.0 - rate ** (most + 1)) / (1.0 - rate)
        horizon, left_s = time_ahead(request, request.tpot_s)
        count += horizon * step_s <= tokens * left_s
    return count
