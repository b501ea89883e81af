"""SpecServe's three algorithms against brute force."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PolicyConfig
from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.policies.base import DecodeRequest, StepContext, StopsDrafting
from cluster.policies.registry import POLICIES, make_policy
from cluster.policies.specserve import Estimator, SpecServe, confidence_prior, strictest
from engine.stop_rules import BEYOND_OBJECTIVE, AdaptiveDrafter, EstimateRule, slo_aware_estimate
from engine.tree import TokenTree
from tests.cluster.policies.batches import context, contexts, request, requests
from tests.examples import examples

CONFIDENCE = st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.8, 0.95, 1.0])
DEPTH = 6


def specserve(**changes: object) -> SpecServe:
    policy = make_policy(PolicyConfig.model_validate({"name": "specserve", **changes}))
    assert isinstance(policy, SpecServe)
    return policy


@st.composite
def estimators(draw: st.DrawFn) -> Estimator:
    token_s = draw(st.sampled_from([0.0, 0.01, 0.05, 0.2, 1.0]))
    verify_s = draw(st.sampled_from([0.5, 1.0, 3.0]))
    tpot_s = draw(st.sampled_from([None, 0.7, 1.5, 4.0]))
    return lambda tokens, drafted: slo_aware_estimate(tokens, verify_s + token_s * drafted, tpot_s)


@st.composite
def rules(draw: st.DrawFn, num_requests: int) -> EstimateRule:
    """Verification with and without a knee; time per step is convex in the layers from the first on."""
    return EstimateRule(
        num_requests=num_requests,
        base_s=draw(st.sampled_from([0.5, 1.0, 3.0])),
        first_layer_s=draw(st.sampled_from([0.0, 0.05, 0.2])),
        layer_s=draw(st.sampled_from([0.0, 0.02, 0.1, 0.4])),
        token_s=draw(st.sampled_from([0.0, 0.01, 0.05, 0.2, 1.0])),
        knee=draw(st.sampled_from([0.0, 3.5, 8.0])),
        past_knee_s=draw(st.sampled_from([0.0, 0.0, 0.3])),
        mean_confidence=draw(CONFIDENCE),
        tpot_s=draw(st.sampled_from([None, 0.7, 1.5, 4.0])),
    )


def test_a_step_beyond_the_objective_is_worth_minus_one() -> None:
    assert slo_aware_estimate(9.0, 0.031, 0.030) == BEYOND_OBJECTIVE == -1.0
    assert slo_aware_estimate(9.0, 0.030, 0.030) == pytest.approx(300.0)
    assert slo_aware_estimate(9.0, 0.090, None) == pytest.approx(100.0)


def curve(confidences: np.ndarray, rule: EstimateRule) -> list[float]:
    """The estimate by number of layers; confidences [layers, requests]."""
    n = confidences.shape[1]
    layers = np.cumprod(confidences, axis=0).sum(axis=1)
    return [rule.estimate(n + float(layers[:k].sum()), k, n * k) for k in range(len(confidences) + 1)]


def drafted(rule: EstimateRule, real: np.ndarray) -> int:
    """Layers drafted when the confidences turn out as `real`, [layers, requests]."""
    adaptive = AdaptiveDrafter(rule)
    acceptance = np.ones(real.shape[1])
    while adaptive.depth < len(real) and adaptive.pays(acceptance.tolist()):
        acceptance = acceptance * real[adaptive.depth]
        adaptive.correct(acceptance.tolist())
    return adaptive.depth


@examples(200)
@given(st.data(), st.integers(1, 4))
def test_the_drafter_stops_at_the_peak_of_its_estimate(data: st.DataObject, n: int) -> None:
    """Where the mean is right, one look ahead finds the depth that enumeration finds."""
    rule = data.draw(rules(n))
    real = np.full((DEPTH, n), rule.mean_confidence)
    values = curve(real, rule)
    depth = drafted(rule, real)
    if depth == 0:
        assert values[1] == BEYOND_OBJECTIVE
    else:
        assert values[depth] == pytest.approx(max(values[1:]))


@examples(200)
@given(st.data(), st.integers(1, 3))
def test_nothing_predicted_beyond_the_stop_is_better(data: st.DataObject, n: int) -> None:
    """With confidences that surprise: no further layers at the mean would raise the estimate."""
    rule = data.draw(rules(n))
    real = np.array(data.draw(st.lists(CONFIDENCE, min_size=n * DEPTH, max_size=n * DEPTH))).reshape(DEPTH, n)
    depth = drafted(rule, real)
    predicted = np.full((DEPTH, n), rule.mean_confidence)
    values = curve(np.concatenate([real[:depth], predicted[depth:]]), rule)
    if depth:
        assert max(values[depth:]) <= values[depth] + 1e-12
    # Each layer was drafted because it was predicted to pay; the first unless it made the step too long.
    for k in range(1, depth + 1):
        before = curve(np.concatenate([real[: k - 1], predicted[:1]]), rule)
        assert before[k] > (before[k - 1] if k > 1 else BEYOND_OBJECTIVE)


@examples(100)
@given(
    batch=st.lists(requests(), min_size=1, max_size=4),
    step=contexts(),
    knee_tokens=st.sampled_from([0.0, 2.0, 6.5]),
    gamma_knee=st.sampled_from([0.0, 4e-4]),
    experts_s=st.sampled_from([0.0, 3e-2]),
    depth=st.integers(2, 8),
    num_drafted=st.integers(0, 20),
)
def test_a_drafter_estimates_what_the_cost_model_says(
    batch: list[DecodeRequest],
    step: StepContext,
    knee_tokens: float,
    gamma_knee: float,
    experts_s: float,
    depth: int,
    num_drafted: int,
) -> None:
    """The plain numbers sent along are the cost model: knee, experts, contexts and corrections."""
    target = msgspec.structs.replace(
        step.cost.profile.target,
        beta=1e-7,
        knee_tokens=knee_tokens,
        gamma_knee=gamma_knee,
        experts_s=experts_s,
        expert_share=0.125,
    )
    drafter = LinearCost(alpha=1e-6, gamma=1e-5, delta=2e-3)
    corrections = {"small": 1.3, "verifier after drafting": 1.3}
    cost = CostModel.corrected(CostProfile(target=target, drafters={"small": drafter}), corrections, {})
    step = replace(step, cost=cost)
    batch = [request("first", drafter="small", max_draft=4), *batch]
    n, num_context = len(batch), sum(view.num_context for view in batch)
    mine = [view for view in batch if view.drafter == "small"]
    rule = specserve().stop_rule("small", len(mine), batch, step)
    draft_s = cost.draft_seconds("small", len(mine), 1, depth, sum(view.num_context for view in mine))
    verify_s = cost.verify_seconds(n, n + num_drafted, num_context, drafted=True)
    expected = slo_aware_estimate(9.0, step.draft_overhead_s + draft_s + verify_s, strictest(batch))
    assert rule.estimate(9.0, depth, num_drafted) == pytest.approx(expected)


@examples(300)
@given(st.lists(st.floats(0.0, 1.0), max_size=10), st.integers(1, 4), estimators())
def test_pruning_in_ascending_order_reaches_the_best(
    acceptance: list[float], n: int, estimate: Estimator
) -> None:
    kept = confidence_prior(np.array(acceptance), n, estimate)
    descending = sorted(acceptance, reverse=True)
    assert sorted((acceptance[i] for i in kept), reverse=True) == descending[: len(kept)]
    values = [estimate(n + sum(descending[:m]), m) for m in range(len(acceptance) + 1)]
    assert values[len(kept)] == pytest.approx(max(values))
    if max(values) == BEYOND_OBJECTIVE:
        assert len(kept) == 0


def test_of_equal_acceptance_the_last_is_dropped_first() -> None:
    def three_at_most(tokens: float, drafted: int) -> float:
        return tokens if drafted <= 3 else BEYOND_OBJECTIVE

    assert confidence_prior(np.full(6, 0.5), 1, three_at_most).tolist() == [0, 1, 2]


def test_only_specserve_and_the_default_send_rules_along() -> None:
    stopping = {name for name in POLICIES if isinstance(make_policy(PolicyConfig(name=name)), StopsDrafting)}
    assert stopping == {"specserve", "flotilla"}


def test_the_rule_follows_the_confidences_seen() -> None:
    policy = specserve()
    batch = [request("a", rate=0.9), request("b", rate=0.7), request("c", rate=0.1, drafter="large")]
    assert policy.stop_rule("small", 2, batch, context()).mean_confidence == pytest.approx(0.8)
    for _ in range(60):
        policy.select([request()], [TokenTree.chain(0, [1, 2], np.log([0.05, 0.05]).tolist())], context())
    assert policy.stop_rule("small", 2, batch, context()).mean_confidence == pytest.approx(0.05)
    assert policy.stop_rule("large", 1, batch, context()).mean_confidence == pytest.approx(0.1)


def test_plans_are_as_deep_as_allowed_unless_a_layer_breaks_the_objective() -> None:
    batch = [request("a", max_draft=3), request("b", rate=0.1), request("c", drafter="", max_draft=0)]
    assert [plan.depth for plan in specserve(max_depth=5).plan(batch, context())] == [3, 5, 0]
    strict = [*batch, request("d", tpot_s=1e-3)]
    assert [plan.depth for plan in specserve(max_depth=5).plan(strict, context())] == [0, 0, 0, 0]
    # With one layer of `small` the step takes 14.8 ms, with one of `large` 16.8 ms.
    some = [request("a", tpot_s=0.016), request("b", drafter="large")]
    assert [plan.depth > 0 for plan in specserve().plan(some, context())] == [True, False]
