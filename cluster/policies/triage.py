"""Who gets what it needs when not all can: the step length and the requests with most objectives attained."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.decode_batch import DecodeBatch
from cluster.policies.goodput import chain_tokens
from cluster.policies.horizon import required_by
from cluster.policies.step_seconds import added_by_drafts

Float64 = NDArray[np.float64]

# Step lengths tried, as multiples of a step that verifies the roots alone.
LENGTHS = np.geomspace(1.0, 4.0, 12)
# So few requests are looked at one by one in less time than all at once.
FEW_REQUESTS = 8


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
    n, batch = len(batch), DecodeBatch.of(batch)
    if not batch.has_objectives:
        return np.zeros(n)
    required = required_by(batch, context.step_s, z)
    if not np.count_nonzero(required):
        return required
    if n <= FEW_REQUESTS:
        return _needs_of_few(batch, required.tolist(), context, max_depth, beside_s)
    pace = required / context.step_s
    rates = batch.drafted_rates
    reach = chain_tokens(rates, np.minimum(batch.limits, max_depth))
    roots_s = beside_s + context.cost.verify_seconds(n, n, batch.num_context, drafted=True)
    added_s = added_by_drafts(batch, n * max_depth, context)
    until_s = np.zeros(len(added_s) + 1)
    added_s.cumsum(out=until_s[1:])
    until_s += roots_s
    lengths = roots_s * LENGTHS[:, None]
    need = pace * lengths
    rows = chain_rows(rates, np.minimum(need, reach))
    rows[need > reach] = n * max_depth + 1
    ordered = rows.copy()
    ordered.sort(axis=1)
    fits = ordered.cumsum(axis=1) <= until_s.searchsorted(lengths, side="right") - 1
    counts = np.add.reduce(fits, axis=1, dtype=np.int64)
    best = len(counts) - 1 - int(counts[::-1].argmax())
    kept = np.zeros(n)
    served = rows[best].argsort(kind="stable")[: counts[best]]
    kept[served] = need[best, served]
    return kept


def _needs_of_few(
    batch: DecodeBatch, required: list[float], context: StepContext, max_depth: int, beside_s: float
) -> Float64:
    """The same as `needs`, in plain numbers; the first step long enough for all in need ends the search."""
    n = len(batch)
    roots_s = beside_s + context.cost.verify_seconds(n, n, batch.num_context, drafted=True)
    added_s = added_by_drafts(batch, n * max_depth, context).tolist()
    until_s = [roots_s, *(roots_s + seconds for seconds in accumulate(added_s))]
    rates = batch.drafted_rates.tolist()
    in_need = []
    for place, tokens in enumerate(required):
        if tokens > 0.0:
            rate = rates[place]
            longest = min(batch[place].max_draft, max_depth)
            reach = (1.0 - rate ** (longest + 1)) / (1.0 - rate)
            in_need.append((place, tokens / context.step_s, rate, reach))
    kept: list[tuple[int, float]] = []
    most_served = -1
    for length in LENGTHS[::-1].tolist():
        length_s = roots_s * length
        chains = []
        for place, pace, rate, reach in in_need:
            need = pace * length_s
            if need <= reach:
                chains.append((_rows_of_chain(rate, need), place, need))
        chains.sort()
        left = bisect_right(until_s, length_s) - 1
        served = []
        for rows, place, need in chains:
            if rows > left:
                break
            left -= rows
            served.append((place, need))
        if len(served) > most_served:
            kept, most_served = served, len(served)
        if most_served == len(in_need):
            break
    found = np.zeros(n)
    for place, need in kept:
        found[place] = need
    return found


def _rows_of_chain(rate: float, required: float) -> int:
    """`chain_rows` of one request."""
    if required <= 1.0:
        return 0
    left = max(1.0 - required * (1.0 - rate), 1e-12)
    rows = math.log(left) / math.log(max(rate, 1e-12)) - 1.0
    return math.ceil(max(rows - 1e-9, 0.0))


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
