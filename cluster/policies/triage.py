"""Who gets what it needs when not all can: the step length and the requests with most objectives attained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.decode_batch import DecodeBatch
from cluster.policies.goodput import chain_tokens
from cluster.policies.horizon import required_by

Float64 = NDArray[np.float64]

# Step lengths tried, as multiples of a step that verifies the roots alone.
LENGTHS = np.geomspace(1.0, 4.0, 12)


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
    required = required_by(batch, context.step_s, z)
    if not np.count_nonzero(required):
        return required
    pace = required / context.step_s
    rates = batch.drafted_rates
    reach = chain_tokens(rates, np.minimum(batch.limits, max_depth))
    roots_s = beside_s + context.cost.verify_seconds(n, n, batch.num_context, drafted=True)
    added_s = context.cost.verify_added_seconds(n, n * max_depth, batch.num_context / n)
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
