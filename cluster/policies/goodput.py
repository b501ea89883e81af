"""Goodput of a step of draft chains: expected tokens, seconds, and the best number of draft slots.

SmartSpec (2024): eq. 3 (goodput), 7 (time), 8 and 9 (chains), 10 (top-k heads). SpecServe (2025): eq. 1-6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.policies.base import DecodeRequest, StepContext
from cluster.policies.decode_batch import DecodeBatch

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Predicted seconds of a step, as a function of draft length and tokens verified.

    Attributes:
        roots_s: float64 [V + 1], a step that drafts so many layers for the whole batch and verifies the
            roots alone, its overhead included. Steps with drafts and without are corrected apart.
        added_s: float64 [tokens + 1], what so many draft tokens add to the verify forward.
    """

    roots_s: Float64
    added_s: Float64

    @classmethod
    def of(
        cls, batch: Sequence[DecodeRequest], max_depth: int, context: StepContext, most_tokens: int
    ) -> StepTimes:
        """Up to `most_tokens` draft tokens; drafters work at the same time, each for all its requests."""
        load, cost = drafter_load(batch), context.cost
        n, num_context = len(batch), sum(request.num_context for request in batch)
        roots_s = np.full(max_depth + 1, context.plain_overhead_s + cost.verify_seconds(n, n, num_context))
        beside_s = context.draft_overhead_s + cost.verify_seconds(n, n, num_context, drafted=True)
        for depth in range(1, max_depth + 1):
            draft_s = (
                cost.draft_seconds(name, count, 1, depth, tokens) for name, (count, tokens) in load.items()
            )
            roots_s[depth] = beside_s + max(draft_s, default=0.0)
        return cls(roots_s, added_seconds(batch, most_tokens, context))

    def seconds(self, depth: int, num_drafted: int) -> float:
        """The step with `depth` layers drafted and `num_drafted` draft tokens verified besides the roots."""
        return float(self.roots_s[depth] + self.added_s[num_drafted])


def added_seconds(batch: Sequence[DecodeRequest], most: int, context: StepContext) -> Float64:
    """float64 [most + 1], seconds that 0 to `most` draft tokens add to verifying the roots of a batch."""
    n = max(1, len(batch))
    added = context.cost.verify_added_seconds(n, most, sum(request.num_context for request in batch) / n)
    return np.concatenate([[0.0], np.cumsum(added)])


def drafter_load(batch: Sequence[DecodeRequest]) -> dict[str, tuple[int, int]]:
    """By drafter: requests of the batch it drafts for, and their context tokens in total."""
    return DecodeBatch.of(batch).load


def chain_limits(batch: Sequence[DecodeRequest], max_depth: int) -> Int64:
    """int64 [requests], longest chain each request may draft; 0 without a drafter."""
    limits = (min(max_depth, request.max_draft) if request.drafter else 0 for request in batch)
    return np.fromiter(limits, dtype=np.int64, count=len(batch))


def chain_tokens(rates: Float64, lengths: Int64) -> Float64:
    """`l(a, k) = (1 - a^(k+1)) / (1 - a)`: tokens each chain yields, the bonus token included (eq. 8).

    Args:
        rates: float64 [requests], a: acceptance rate per token, in [0, 1].
        lengths: int64 [requests], k: tokens drafted.
    """
    certain = rates >= 1.0
    if not np.count_nonzero(certain):
        return (1.0 - rates ** (lengths + 1)) / (1.0 - rates)
    rest = np.where(certain, 0.0, rates)
    return np.where(certain, lengths + 1.0, (1.0 - rest ** (lengths + 1)) / (1.0 - rest))


def head_tokens(rates: Sequence[float] | Float64, widths: Sequence[int] | Int64) -> Float64:
    """Tokens one step yields when head i proposes its `widths[i]` likeliest tokens, in a full tree.

    Some candidate of head j is right with `P_j = 1 - (1 - a_j)^(k_j)`, so the step yields
    `1 + sum over i of prod over j <= i of P_j`. This is eq. 10 with two repairs, without which it is no
    expectation (its weights do not sum to 1): the case that no head is right (i = 0, one token) is
    counted, and head i + 1 fails with `(1 - a_(i+1))^(k_(i+1))` rather than `1 - a_(i+1)`.

    Args:
        rates: float64 [heads], a_i: acceptance rate of any one candidate of head i.
        widths: int64 [..., heads], k_i: candidates of head i; 0 for a head that is not used.

    Returns:
        float64 [...].
    """
    right = 1.0 - (1.0 - np.asarray(rates)) ** np.asarray(widths)
    return np.asarray(1.0 + np.cumprod(right, axis=-1).sum(axis=-1))


def head_nodes(widths: Sequence[int] | Int64) -> Int64:
    """Draft tokens verified in the full tree of those heads: `sum over h of prod over i <= h of k_i`.

    `widths` are int64 [..., heads], k_i; the result is int64 [...].
    """
    return np.asarray(np.cumprod(np.asarray(widths, dtype=np.int64), axis=-1).sum(axis=-1))


def best_prefix(gains: Float64, tokens: float, seconds: Float64) -> tuple[int, float]:
    """How many draft slots to take for the highest goodput, the best first.

    Args:
        gains: float64 [slots], descending: expected tokens each slot adds.
        tokens: expected tokens without any slot.
        seconds: float64 [slots + 1], of the step with so many slots.

    Returns:
        the smallest number of slots that has the highest goodput, and that goodput in tokens per second.
    """
    goodput = (tokens + np.concatenate([[0.0], np.cumsum(gains)])) / seconds
    best = int(np.argmax(goodput))
    return best, float(goodput[best])
