"""Who gets what it needs when not all can: the step length and the requests with most objectives attained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.goodput import chain_tokens
from cluster.policies.horizon import required_tokens

Float64 = NDArray[np.float64]

# Step lengths tried, as multiples of a step that verifies the roots alone.
LENGTHS = np.geomspace(1.0, 4.0, 12)
# An acceptance rate of 1 would make any chain sure.
MOST_CERTAIN_RATE = 0.98


def needs(
    batch: Sequence[DecodeRequest], context: StepContext, z: float, max_depth: int, beside_s: float
) -> Float64:
    """Expected tokens that each request is to get from this step; 0 for those that nothing can be done for.

    A longer step verifies more drafts, and everybody needs more tokens from it: what is needed is a pace, in
    tokens per second. For each of several step lengths the requests whose shortest sufficient chains fit into
    it are counted, those with the shortest chains first; the length with the highest count is taken, of
    equals the longest. AdaServe serves descending need instead: past saturation its budget goes to requests
    that are late already, and others become late meanwhile.

    Args:
        batch: requests of the step.
        context: costs, and the recent length of a step.
        z: quantile of the chance constraint, from `horizon.quantile`.
        max_depth: longest chain.
        beside_s: seconds of a step beside verifying these requests: drafting, prompts, messages.

    Returns:
        float64 [requests]; 0 without an objective, too.
    """
    n = len(batch)
    required = np.array([required_tokens(request, context.step_s, z) for request in batch])
    if not required.any():
        return required
    pace = required / context.step_s
    rates = np.array([min(request.rate, MOST_CERTAIN_RATE) if request.drafter else 0.0 for request in batch])
    reach = chain_tokens(rates, np.array([min(request.max_draft, max_depth) for request in batch]))
    num_context = sum(request.num_context for request in batch)
    roots_s = beside_s + context.cost.verify_seconds(n, n, num_context, drafted=True)
    added_s = context.cost.verify_added_seconds(n, n * max_depth, num_context / n)
    until_s = roots_s + np.concatenate([[0.0], np.cumsum(added_s)])
    lengths = roots_s * LENGTHS[:, None]
    need = pace * lengths
    rows = chain_rows(rates, np.minimum(need, reach))
    rows[need > reach] = n * max_depth + 1
    order = np.argsort(rows, axis=1, kind="stable")
    total = np.cumsum(np.take_along_axis(rows, order, axis=1), axis=1)
    fits = total <= np.searchsorted(until_s, lengths, side="right") - 1
    counts = fits.sum(axis=1)
    best = len(counts) - 1 - int(np.argmax(counts[::-1]))
    kept = np.zeros(n)
    served = order[best, : counts[best]]
    kept[served] = need[best, served]
    return kept


def chain_rows(rates: Float64, required: Float64) -> Float64:
    """Draft tokens of the shortest chain that yields so many expected tokens, its root included in the yield.

    That is the least k with `(1 - a^(k+1)) / (1 - a) >= required`.

    Args:
        rates: float64 [requests], a: acceptance rate per token, below 1.
        required: float64 [..., requests], at most what a chain of some length yields.
    """
    left = np.maximum(1.0 - required * (1.0 - rates), 1e-12)
    rows = np.log(left) / np.log(np.maximum(rates, 1e-12)) - 1.0
    return np.asarray(np.where(required > 1.0, np.ceil(np.maximum(rows - 1e-9, 0.0)), 0.0))
