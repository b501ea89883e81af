"""SpecServe's three algorithms against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import PolicyConfig
from cluster.policies.registry import make_policy
from cluster.policies.specserve import (
    BEYOND_OBJECTIVE,
    Estimator,
    adaptive_drafter,
    confidence_prior,
    slo_aware_estimate,
)
from engine.tree import TokenTree
from tests.cluster.policies.batches import context, request

CONFIDENCE = st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.8, 0.95, 1.0])
DEPTH = 6


@st.composite
def estimators(draw: st.DrawFn) -> Estimator:
    draft_s = draw(st.sampled_from([0.0, 0.02, 0.1, 0.4]))
    token_s = draw(st.sampled_from([0.0, 0.01, 0.05, 0.2, 1.0]))
    verify_s = draw(st.sampled_from([0.5, 1.0, 3.0]))
    tpot_s = draw(st.sampled_from([None, 0.7, 1.5, 4.0]))
    return lambda tokens, depth, drafted: slo_aware_estimate(
        tokens, verify_s + draft_s * depth + token_s * drafted, tpot_s
    )


def test_a_step_beyond_the_objective_is_worth_minus_one() -> None:
    assert slo_aware_estimate(9.0, 0.031, 0.030) == BEYOND_OBJECTIVE == -1.0
    assert slo_aware_estimate(9.0, 0.030, 0.030) == pytest.approx(300.0)
    assert slo_aware_estimate(9.0, 0.090, None) == pytest.approx(100.0)


def curve(confidences: np.ndarray, estimate: Estimator) -> list[float]:
    """The estimate by number of layers; confidences [layers, requests]."""
    n = confidences.shape[1]
    layers = np.cumprod(confidences, axis=0).sum(axis=1)
    return [estimate(n + float(layers[:k].sum()), k, n * k) for k in range(len(confidences) + 1)]


@settings(max_examples=200, deadline=None)
@given(st.lists(CONFIDENCE, min_size=1, max_size=4), estimators(), st.booleans())
def test_the_drafter_stops_at_the_peak_of_its_estimate(
    mean: list[float], estimate: Estimator, may_draft_nothing: bool
) -> None:
    """Where the mean is right, one look ahead finds the depth that enumeration finds."""
    expected = np.array(mean)
    values = curve(np.tile(expected, (DEPTH, 1)), estimate)
    best = values[0] if may_draft_nothing else BEYOND_OBJECTIVE
    limits = np.full(len(mean), DEPTH)
    depth = len(adaptive_drafter(lambda layer: expected, expected, limits, estimate, best))
    assert values[depth] == pytest.approx(max(values if may_draft_nothing or depth == 0 else values[1:]))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 3), estimators())
def test_nothing_predicted_beyond_the_stop_is_better(
    data: st.DataObject, n: int, estimate: Estimator
) -> None:
    """With confidences that surprise: no further layers at the mean would raise the estimate."""
    mean = np.array(data.draw(st.lists(CONFIDENCE, min_size=n, max_size=n)))
    real = np.array(data.draw(st.lists(CONFIDENCE, min_size=n * DEPTH, max_size=n * DEPTH))).reshape(DEPTH, n)
    limits = np.full(n, DEPTH)
    layers = adaptive_drafter(lambda layer: real[layer - 1], mean, limits, estimate, estimate(float(n), 0, 0))
    depth = len(layers)
    np.testing.assert_allclose(np.array(layers).reshape(depth, n), np.cumprod(real, axis=0)[:depth])
    values = curve(np.concatenate([real[:depth], np.tile(mean, (DEPTH - depth, 1))]), estimate)
    assert max(values[depth:]) <= values[depth] + 1e-12
    # Each layer was drafted because it was predicted to pay.
    for k in range(1, depth + 1):
        before = curve(np.concatenate([real[: k - 1], mean[None]]), estimate)
        assert before[k] > before[k - 1]


def test_a_request_at_its_limit_is_neither_drafted_for_nor_counted() -> None:
    seen: list[int] = []

    def estimate(tokens: float, depth: int, drafted: int) -> float:
        seen.append(drafted)
        return tokens

    ones = np.ones(2)
    layers = adaptive_drafter(lambda layer: ones, ones, np.array([1, 3]), estimate)
    assert [layer.tolist() for layer in layers] == [[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    assert max(seen) == 4


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), max_size=10), st.integers(1, 4), estimators())
def test_pruning_in_ascending_order_reaches_the_best(
    acceptance: list[float], n: int, estimate: Estimator
) -> None:
    kept = confidence_prior(np.array(acceptance), n, 2, estimate)
    descending = sorted(acceptance, reverse=True)
    assert sorted((acceptance[i] for i in kept), reverse=True) == descending[: len(kept)]
    values = [estimate(n + sum(descending[:m]), 2, m) for m in range(len(acceptance) + 1)]
    assert values[len(kept)] == pytest.approx(max(values))
    if max(values) == BEYOND_OBJECTIVE:
        assert len(kept) == 0


def test_of_equal_acceptance_the_last_is_dropped_first() -> None:
    def three_at_most(tokens: float, depth: int, drafted: int) -> float:
        return tokens if drafted <= 3 else BEYOND_OBJECTIVE

    assert confidence_prior(np.full(6, 0.5), 1, 6, three_at_most).tolist() == [0, 1, 2]


def test_depth_follows_the_confidences_seen_and_the_objective() -> None:
    policy = make_policy(PolicyConfig(name="specserve"))
    before = policy.plan([request(rate=0.9)], context())[0].depth
    for _ in range(60):
        policy.select([request()], [TokenTree.chain(0, [1, 2], np.log([0.05, 0.05]).tolist())], context())
    assert before > policy.plan([request(rate=0.9)], context())[0].depth
    strict = make_policy(PolicyConfig(name="specserve"))
    batch = [request("a", rate=0.9), request("b", rate=0.9, tpot_s=1e-3)]
    assert [plan.depth for plan in strict.plan(batch, context())] == [0, 0]
