"""What drafting deeper brings to a batch: expected tokens and rows to verify, by depth."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from cluster.policies.decode_batch import MOST_CERTAIN_RATE, DecodeBatch

# Drafts less likely accepted than this are not counted on when depth is planned.
LEAST_CHANCE = 0.1
# What a cheap drafter proposes can all be drafted and the sure part verified: so often is that right.
PRECISION = 0.7
# So few requests are looked at one by one in less time than all at once.
FEW_REQUESTS = 8


def tokens_by_depth(
    batch: DecodeBatch, deepest: int, cheap: Collection[str]
) -> tuple[list[float], list[float]]:
    """Chains of every depth from 0 to `deepest`, each request's as long as it may be.

    A token at depth d is accepted with the request's acceptance rate to the power of d. Selection will drop
    drafts that have little chance this deep, and what cheap drafters are unsure of.

    Args:
        batch: requests of the step.
        deepest: most layers.
        cheap: drafters whose layers cost next to nothing.

    Returns:
        float [deepest + 1], expected tokens of the step, the roots' own included; and float [deepest + 1],
        draft tokens to be verified.
    """
    if len(batch) <= FEW_REQUESTS:
        return _of_few(batch, deepest, cheap)
    n, rates = len(batch), batch.drafted_rates
    depths = np.arange(1, deepest + 1)[:, None]
    gain = np.where(batch.limits >= depths, rates**depths, 0.0)  # [depths, requests]
    worth = gain > LEAST_CHANCE
    rows: NDArray[np.float64] | NDArray[np.bool_] = worth
    if cheap:
        is_cheap = np.array([request.drafter in cheap for request in batch])
        rows = worth * np.where(is_cheap, np.minimum(gain / PRECISION, 1.0), 1.0)
    expected = n + np.add.reduce(gain * worth, axis=1).cumsum()
    drafted = np.add.reduce(rows, axis=1, dtype=np.float64).cumsum()
    return [float(n), *expected.tolist()], [0.0, *drafted.tolist()]


def _of_few(batch: DecodeBatch, deepest: int, cheap: Collection[str]) -> tuple[list[float], list[float]]:
    gains, rows = [0.0] * deepest, [0.0] * deepest
    for request in batch:
        rate = min(request.rate, MOST_CERTAIN_RATE) if request.drafter else 0.0
        is_cheap, chance = request.drafter in cheap, 1.0
        for depth in range(min(request.max_draft, deepest)):
            chance *= rate
            if chance <= LEAST_CHANCE:
                break
            gains[depth] += chance
            rows[depth] += min(chance / PRECISION, 1.0) if is_cheap else 1.0
    expected, drafted = [float(len(batch))], [0.0]
    for gain, row in zip(gains, rows, strict=True):
        expected.append(expected[-1] + gain)
        drafted.append(drafted[-1] + row)
    return expected, drafted
