"""Goodput of a step of draft chains: expected tokens, seconds, and the best number of draft slots.

SmartSpec (2024): eq. 3 (goodput), 7 (time), 8 and 9 (chains), 10 (top-k heads). SpecServe (2025): eq. 1-6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        roots_s: float64 [levels + 1], a step that drafts to some level and verifies the roots alone, its
            overhead included; level 0 drafts nothing. Steps with drafts and without are corrected apart.
        added_s: float64 [tokens + 1], what so many draft tokens add to the verify forward.
        reach: int64 [levels + 1, requests], the longest chain each may have at a level; None where a level
            is a layer for everybody.
    """

    roots_s: Float64
    added_s: Float64
    reach: Int64 | None = None

    @classmethod
    def of(
        cls, batch: Sequence[DecodeRequest], limits: Int64, max_depth: int, context: StepContext, most: int
    ) -> StepTimes:
        """Of one length for all who may draft, each to its limit; up to `most` draft tokens.

        Drafters work at the same time, each for all its requests, to the deepest of these. One that may
        draft for nobody takes no time.
        """
        draft_s = [drafting for drafting, _ in _draft_times(batch, limits, max_depth, context)]
        slowest_s = np.max(draft_s, axis=0) if draft_s else np.zeros(max_depth + 1)
        return cls._beside(batch, slowest_s, context, most)

    @classmethod
    def by_level(
        cls, batch: Sequence[DecodeRequest], limits: Int64, max_depth: int, context: StepContext, most: int
    ) -> StepTimes:
        """Of a length for each request: a level is a time that some drafter needs for some depth.

        While it drafts, each of the others drafts as deep as it can, or nothing. Arguments as of `of`.
        """
        drafting = _draft_times(batch, limits, max_depth, context)
        level_s = np.unique([draft_s[1:] for draft_s, _ in drafting])
        reach = np.zeros((len(level_s) + 1, len(batch)), dtype=np.int64)
        for draft_s, mine in drafting:
            reach[1:, mine] = np.searchsorted(draft_s[1:], level_s, side="right")[:, None]
        return replace(
            cls._beside(batch, np.concatenate([[0.0], level_s]), context, most),
            reach=np.minimum(reach, limits),
        )

    @classmethod
    def _beside(
        cls, batch: Sequence[DecodeRequest], draft_s: Float64, context: StepContext, most: int
    ) -> StepTimes:
        """With these seconds of drafting; the first are of a step without."""
        n, num_context = len(batch), sum(request.num_context for request in batch)
        roots_s = draft_s + context.draft_overhead_s
        roots_s += context.cost.verify_seconds(n, n, num_context, drafted=True)
        roots_s[0] = context.plain_overhead_s + context.cost.verify_seconds(n, n, num_context)
        return cls(roots_s, added_seconds(batch, most, context))

    def seconds(self, depth: int, num_drafted: int) -> float:
        """The step with `depth` layers drafted and `num_drafted` draft tokens verified besides the roots."""
        return float(self.roots_s[depth] + self.added_s[num_drafted])


def added_seconds(batch: Sequence[DecodeRequest], most: int, context: StepContext) -> Float64:
    """float64 [most + 1], seconds that 0 to `most` draft tokens add to verifying the roots of a batch."""
    n = max(1, len(batch))
    added = context.cost.verify_added_seconds(n, most, sum(request.num_context for request in batch) / n)
    return np.concatenate([[0.0], np.cumsum(added)])


def _draft_times(
    batch: Sequence[DecodeRequest], limits: Int64, max_depth: int, context: StepContext
) -> list[tuple[Float64, Int64]]:
    """Of each drafter that may draft: seconds of 0 to `max_depth` layers (float64), and its requests (int64).

    No more layers than the longest of its limits.
    """
    drafters = np.array([request.drafter for request in batch])
    found = []
    for name, (count, tokens) in DecodeBatch.of(batch).load.items():
        mine = np.flatnonzero(drafters == name)
        deepest = int(limits[mine].max())
        if deepest > 0:
            draft_s = context.cost.draft_seconds_by_depth(name, count, 1, deepest, tokens)
            found.append((np.pad(draft_s, (0, max_depth - deepest), mode="edge"), mine))
    return found


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
