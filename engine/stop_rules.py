"""When to stop drafting a batch, asked after every layer: SpecServe's rule (2025) and ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

# Estimate of a step that takes longer than the objective (Algorithm 3).
BEYOND_OBJECTIVE = -1.0


def slo_aware_estimate(tokens: float, step_s: float, tpot_s: float | None) -> float:
    """Algorithm 3: expected tokens per second, or -1 for a step longer than the objective.

    The worst case counts, one token per step: then the step's seconds are the request's TPOT.
    """
    if tpot_s is not None and step_s > tpot_s:
        return BEYOND_OBJECTIVE
    return tokens / step_s


class Stopping(Protocol):
    """A rule at work on one batch. The caller drafts, and asks in between."""

    def pays(self, parents: Sequence[float]) -> bool:
        """Whether one more layer is worth drafting.

        Args:
            parents: acceptance of the nodes that would get a child each, as their drafter says.
        """
        ...

    def correct(self, layer: Sequence[float]) -> None:
        """A layer was drafted; `layer` has the acceptance of its nodes."""
        ...


class EstimateRule(msgspec.Struct, frozen=True, kw_only=True, tag="estimate"):
    """What a drafter needs to know to estimate a step: how the estimate of Algorithm 3 depends on its draft.

    Attributes:
        num_requests: requests in the step, whether drafted for or not: each has one token for certain.
        base_s: seconds of the step without any draft token: overhead, and verifying the roots.
        first_layer_s, layer_s: seconds of drafting the first layer, and each further one.
        token_s: seconds each draft token adds to verification.
        knee: draft tokens with which verification reaches the knee of its roofline.
        past_knee_s: seconds that each draft token past the knee adds on top.
        experts_s: seconds of the experts that no root is sent to.
        expert_share: of all experts, how many each token is sent to.
        mean_confidence: historical mean draft probability, the prediction for a layer not drafted yet.
        tpot_s: strictest objective among the requests, in seconds per token; None without one.
    """

    num_requests: int
    base_s: float
    first_layer_s: float
    layer_s: float
    token_s: float
    mean_confidence: float
    knee: float = 0.0
    past_knee_s: float = 0.0
    experts_s: float = 0.0
    expert_share: float = 0.0
    tpot_s: float | None = None

    def estimate(self, tokens: float, depth: int, num_drafted: int) -> float:
        """Efficiency of the step with `depth` layers drafted and `num_drafted` tokens of them verified."""
        step_s = self.base_s + self.token_s * num_drafted
        if num_drafted > self.knee:
            step_s += self.past_knee_s * (num_drafted - self.knee)
        if self.experts_s:
            step_s += self.experts_s * (1.0 - (1.0 - self.expert_share) ** num_drafted)
        if depth > 0:
            step_s += self.first_layer_s + (depth - 1) * self.layer_s
        return slo_aware_estimate(tokens, step_s, self.tpot_s)

    def begin(self) -> AdaptiveDrafter:
        """Nothing is drafted yet."""
        return AdaptiveDrafter(self)


class ForwardRule(msgspec.Struct, frozen=True, kw_only=True, tag="forward"):
    """Another layer while all requests together gain more by it than its forward is worth.

    A forward takes nearly as long for few rows as for many. Of many requests some are always sure enough to
    go on by themselves, and drafting would never end before its limit. Everything is counted in tokens that
    the step's seconds are worth, so that a child of chance `f` gains `f` less what verifying it costs, and
    none where that is below 0: it would not be verified.

    Attributes:
        rate: chance that the child of an accepted node is accepted.
        verify_tokens: what verifying a token costs.
        row_tokens: what each row of the drafter's forward costs.
        forward_tokens: what a forward costs besides its rows.
        exponent: power of a path's probability, as the drafter says it, that is its chance.
    """

    rate: float
    verify_tokens: float
    row_tokens: float
    forward_tokens: float
    exponent: float = 1.0

    def begin(self) -> ForwardRule:
        """Itself: what was drafted before does not matter."""
        return self

    def pays(self, parents: Sequence[float]) -> bool:
        """Whether the children of these nodes gain more than their forward costs."""
        rate, cost, exponent = self.rate, self.verify_tokens, self.exponent
        children = [math.pow(p, exponent) * rate for p in parents]
        gain = sum([chance - cost for chance in children if chance > cost])
        return gain > self.forward_tokens + self.row_tokens * len(parents)

    def correct(self, layer: Sequence[float]) -> None:
        """Nothing to correct."""


StopRule = EstimateRule | ForwardRule


class AdaptiveDrafter:
    """Algorithm 1, "predict, execute, correct": another layer while that is predicted to raise the estimate.

    The caller executes: `pays` predicts for the next layer, and `correct` puts in what came of it. The
    acceptance of a token not drafted yet is predicted as that of its parent times the mean confidence (eq.
    8); the listing (lines 3, 19) appends the mean alone, which overrates every layer but the first.

    Attributes:
        depth: layers so far.
        num_drafted: draft tokens in them.
        tokens: expected tokens of the step: one per request, and the acceptance of every draft token.
        best: estimate as it stands, which the next layer must exceed.
    """

    __slots__ = ("_rule", "best", "depth", "num_drafted", "tokens")

    def __init__(self, rule: EstimateRule) -> None:
        """Nothing is drafted yet; the first layer is, unless the step would be longer than the objective."""
        self._rule = rule
        self.depth = 0
        self.num_drafted = 0
        self.tokens = float(rule.num_requests)
        self.best = BEYOND_OBJECTIVE

    def pays(self, parents: Sequence[float]) -> bool:
        """Predict: whether one more layer raises the estimate.

        Args:
            parents: acceptance (AR) of the nodes that would get a child each.
        """
        predicted = self.tokens + self._rule.mean_confidence * sum(parents)
        return self._rule.estimate(predicted, self.depth + 1, self.num_drafted + len(parents)) > self.best

    def correct(self, layer: Sequence[float]) -> None:
        """A layer was drafted; `layer` has the acceptance of its nodes, by their real confidences."""
        self.depth += 1
        self.num_drafted += len(layer)
        self.tokens += sum(layer)
        self.best = self._rule.estimate(self.tokens, self.depth, self.num_drafted)
