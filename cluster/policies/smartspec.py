"""SmartSpec (2024): draft length by goodput; sections 4.2-4.4, Algorithms 1 and 2; Algorithm 3 (appendix)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cluster.config import PolicyConfig
from cluster.forest import Forest
from cluster.policies.base import DecodeRequest, Int32, StepContext, all_nodes
from cluster.policies.goodput import (
    Float64,
    Int64,
    StepTimes,
    added_seconds,
    best_prefix,
    chain_limits,
    chain_tokens,
)
from cluster.policies.head_trees import best_head_widths, full_trees, head_limits
from cluster.policies.planned_early import PlannedEarly
from cluster.policies.threshold import log_probability
from drafters.messages import DraftPlan
from engine.tree import TokenTree


class SmartSpec(PlannedEarly):
    """Chains of the length with the highest goodput; length 0 turns speculation off.

    `smartspec_acceptance` says what acceptance is predicted from:

    - `global`: one rate, the mean over the batch, and one length for all (section 4.4, granularity 1).
    - `request`: each request's own rate and its own length (granularity 2).
    - `confidence`: everybody drafts while the last token's draft probability is above the threshold T, at
      most `max_depth` and at least one token; a token is predicted to be accepted when it and those before
      it are above T, and the lengths verified maximise goodput under that prediction (Algorithm 3).

    Requests drafted for by decoding heads get full trees instead of chains, with as many of each head's
    tokens as have the highest goodput (section 4.4, top-k tree-style), alike for all; but for the confidence
    variant, which knows chains only. The engine's one rate stands for all heads. In a batch with both, each
    kind is decided on as if the other just decoded.

    The moving averages are the engine's estimates in `DecodeRequest.rate`. Which requests are batched (the
    prefixes of Algorithm 2) and whether a drafter reads a prompt (draft-prefill disabling, section 5) is
    not for a policy to say in this protocol. There is no probing while speculation is off.

    With `smartspec_ahead`, which is ours, a length is of a step before its tokens are known: rates and
    requests are a step old. Nothing is selected of what is sent so, and heads draft chains, too.

    Attributes:
        plans_ahead: whether it may be asked for such lengths.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self.plans_ahead = config.smartspec_ahead

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """Lengths by goodput; with the confidence variant, as long as allowed."""
        if not batch:
            return []
        limits = chain_limits(batch, self._config.max_depth)
        if self._config.smartspec_acceptance == "confidence":
            # A draft goes on above T, and not at T.
            least = math.nextafter(log_probability(self._config.confidence_threshold), math.inf)
            return [DraftPlan(depth=k, stop_token_logp=least) for k in limits.tolist()]
        rates = np.array([request.rate for request in batch])
        heads = np.zeros_like(limits) if context.is_ahead else head_limits(batch, limits)
        limits = limits - heads
        make_times = StepTimes.of if self._config.smartspec_acceptance == "global" else StepTimes.by_level
        times = make_times(batch, limits, self._config.max_depth, context, int(limits.sum()))
        if self._config.smartspec_acceptance == "global":
            speculating = limits > 0
            rate = float(rates[speculating].mean()) if speculating.any() else 0.0
            lengths = np.minimum(best_common_length(rate, limits, times), limits)
        else:
            lengths = best_lengths(rates, limits, times)
        plans = [DraftPlan(depth=k) for k in lengths.tolist()]
        if heads.any():
            widths = self._head_widths(batch, heads, context)
            depth, width = int((widths > 0).sum()), max(1, int(np.cumprod(widths).max()))
            for i in np.flatnonzero(heads).tolist():
                plans[i] = DraftPlan(depth=min(depth, int(heads[i])), width=width)
        return plans

    def _head_widths(self, batch: Sequence[DecodeRequest], heads: Int64, context: StepContext) -> Int64:
        """k_1..k_h for all requests drafted for by heads; `heads` int64 [requests] are their limits."""
        drafted = [request for request in batch if request.num_heads]
        rate = float(np.mean([request.rate for request in drafted]))
        num_heads = max(request.num_heads for request in drafted)
        most_in_layer = min(request.max_width for request in drafted)
        most = most_in_layer * int(heads.sum())
        times = StepTimes.of(batch, heads, self._config.max_depth, context, most)
        return best_head_widths(
            np.full(num_heads, rate), heads, times, num_heads, self._config.max_width, most_in_layer
        )

    def _select_head_trees(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """Full trees of those drafted for by heads, by the widths that are best for this batch now."""
        limits = chain_limits(batch, self._config.max_depth)
        widths = self._head_widths(batch, head_limits(batch, limits), context)
        selected = all_nodes(trees)
        rows = [i for i, request in enumerate(batch) if request.num_heads]
        chosen = full_trees([trees[i] for i in rows], [widths] * len(rows))
        for i, nodes in zip(rows, chosen, strict=True):
            selected[i] = nodes
        return selected

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """Everything drafted; with the confidence variant, what maximises goodput."""
        if self._config.smartspec_acceptance != "confidence":
            if any(request.num_heads for request in batch):
                return self._select_head_trees(batch, trees, context)
            return all_nodes(trees)
        if not batch:
            return []
        forest = Forest.of(trees)
        above = (forest.conditional > self._config.confidence_threshold).astype(float)
        above[forest.roots] = 1.0
        accepted = forest.path_product(above)
        drafted = np.flatnonzero((accepted > 0.0) & (forest.parent >= 0))
        n = len(batch)
        num_context = sum(request.num_context for request in batch)
        verify_s = context.cost.verify_seconds(n, n, num_context, drafted=True)
        base_s = context.draft_s + context.draft_overhead_s + verify_s
        seconds = base_s + added_seconds(batch, len(drafted), context)
        count, _ = best_prefix(accepted[drafted], float(n), seconds)
        chosen = np.zeros(forest.num_nodes, dtype=np.bool_)
        chosen[forest.roots] = True
        # All are predicted alike, so the shallow ones come first; then every prefix is closed under parent.
        chosen[drafted[np.argsort(forest.depth[drafted], kind="stable")[:count]]] = True
        return forest.chosen_nodes(chosen)


def common_goodput(rate: float, length: int, limits: Int64, times: StepTimes) -> float:
    """Expected tokens per second when everybody drafts `length` tokens, or its limit (eq. 3, 8).

    Args:
        rate: acceptance rate of all requests.
        length: k.
        limits: int64 [requests], most tokens each may draft.
        times: predicted seconds.
    """
    lengths = np.minimum(length, limits)
    tokens = float(chain_tokens(np.full(len(limits), rate), lengths).sum())
    return tokens / times.seconds(int(lengths.max()), int(lengths.sum()))


def best_common_length(rate: float, limits: Int64, times: StepTimes) -> int:
    """The k in `0..V` with the highest goodput; the smallest of equals. Arguments as `common_goodput`."""
    goodput = [common_goodput(rate, k, limits, times) for k in range(len(times.roots_s))]
    return int(np.argmax(goodput))


def best_lengths(rates: Float64, limits: Int64, times: StepTimes) -> Int64:
    """The k_i with the highest goodput of the batch (eq. 9); shorter drafts where equals exist.

    Exact without enumerating `(V + 1)^n` vectors: with the seconds of drafting given, only how many tokens
    are verified costs time, so the best m slots are the m largest `a_i^j`; both are then enumerated.

    Args:
        rates: float64 [requests], a_i.
        limits: int64 [requests], most tokens each may draft.
        times: predicted seconds.

    Returns:
        int64 [requests], tokens each drafts.
    """
    n = len(rates)
    best, best_k = n / times.seconds(0, 0), np.zeros(n, dtype=np.int64)
    positions = np.arange(1, int(limits.max()) + 1)[:, None]
    gain = rates**positions
    for level in range(1, len(times.roots_s)):
        most = np.minimum(limits, level if times.reach is None else times.reach[level])
        deepest = int(most.max())
        # Row by row in position, so that of equal gains the earlier position is taken first.
        gains = np.where(positions[:deepest] <= most, gain[:deepest], 0.0).ravel()
        if n + gains.sum() <= best * times.roots_s[level]:
            continue  # not even if verifying them took no time
        # No more than limits allow, which leaves out some that gain nothing.
        order = np.argsort(-gains, kind="stable")[: int(most.sum())]
        seconds = times.roots_s[level] + times.added_s[: len(order) + 1]
        count, goodput = best_prefix(gains[order], float(n), seconds)
        if goodput > best:
            best = goodput
            best_k = np.bincount(order[:count] % n, minlength=n).astype(np.int64)
    return np.minimum(best_k, limits)
