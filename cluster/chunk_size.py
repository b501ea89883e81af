"""How many tokens of prompts a verify step takes: as configured, or chosen from what tokens cost."""

from __future__ import annotations

import math

from cluster.config import SchedulerConfig
from cluster.linear_cost import LinearCost

# A step with a full chunk takes about so many times longer than one that decodes a request. Beyond, a prompt
# is hardly sooner read (what a step takes whatever is in it is by then a small part), and who decodes beside
# it waits longer for each token.
CHUNK_MULTIPLE = 5.0
# Smaller ones read weights too often, larger ones hold up those without objectives, whom no rule protects.
LEAST_CHUNK, MOST_CHUNK = 128, 2048


def chunk_tokens(scheduler: SchedulerConfig, target: LinearCost) -> int:
    """Most prompt tokens of a verify step.

    Args:
        scheduler: says how many, or `auto`.
        target: what forwards of the target cost by the profile. `auto` is the power of two that takes nearest
            to `CHUNK_MULTIPLE` forwards of one token: 1,024 of an 8B model on an H200, 128 on a CPU.
    """
    if scheduler.prefill_chunk != "auto":
        return scheduler.prefill_chunk
    token_s = target.token_seconds()
    if token_s <= 0.0:  # not measured
        return LEAST_CHUNK
    wanted = CHUNK_MULTIPLE * target.seconds(1, 1, 0) / token_s
    most = min(max(wanted, LEAST_CHUNK), MOST_CHUNK)
    return 1 << round(math.log2(most))
