"""SmartSpec: closed forms against simulation, argmax against enumeration."""

from __future__ import annotations

import dataclasses
import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config import PolicyConfig
from cluster.policies.goodput import StepTimes, best_prefix, chain_tokens, head_nodes, head_tokens
from cluster.policies.registry import make_policy
from cluster.policies.smartspec import best_common_length, best_lengths, common_goodput
from engine.tree import TokenTree
from selector.acceptance import expected_tokens
from tests.cluster.policies.batches import context, request
from tests.examples import examples

SAMPLES = 100_000
RATES = st.sampled_from([0.0, 0.2, 0.5, 0.5, 0.8, 0.95, 1.0])


@st.composite
def step_times(draw: st.DrawFn, max_depth: int = 3) -> StepTimes:
    layer_s = draw(st.sampled_from([0.0, 0.1, 0.5]))
    verify_s = draw(st.sampled_from([0.5, 2.0]))
    token_s, knee = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])), draw(st.sampled_from([0, 3]))
    return StepTimes(
        roots_s=verify_s + np.array([0.0] + [0.05 + layer_s * (k + 1) for k in range(max_depth)]),
        added_s=token_s * np.maximum(np.arange(4 * max_depth + 1) - knee, 0),
    )


@pytest.mark.parametrize(("rate", "length"), [(0.0, 3), (0.3, 1), (0.7, 4), (0.9, 8), (1.0, 5)])
def test_the_chain_form_matches_simulation(rate: float, length: int) -> None:
    accepted = np.random.default_rng(1).random((SAMPLES, length)) < rate
    tokens = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
    (form,) = chain_tokens(np.array([rate]), np.array([length]))
    assert form == pytest.approx(tokens.mean(), abs=5 * tokens.std() / SAMPLES**0.5 + 1e-9)
    assert form == pytest.approx(expected_tokens(rate, length))


HEADS = [([0.6], [2]), ([0.6, 0.4, 0.2], [3, 2, 3]), ([0.8, 0.8], [1, 1])]


@pytest.mark.parametrize(("rates", "widths"), HEADS)
def test_the_top_k_head_form_matches_simulation(rates: list[float], widths: list[int]) -> None:
    rng = np.random.default_rng(2)
    heads = [(rng.random((SAMPLES, k)) < a).any(axis=1) for a, k in zip(rates, widths, strict=True)]
    tokens = 1 + np.cumprod(np.stack(heads, axis=1), axis=1).sum(axis=1)
    assert head_tokens(rates, widths) == pytest.approx(tokens.mean(), abs=5 * tokens.std() / SAMPLES**0.5)
    # Equation 10 as printed leaves out the step in which no head is right, and misses by far more.
    ends = [*rates[1:], 0.0]
    right = np.cumprod([1 - (1 - a) ** k for a, k in zip(rates, widths, strict=True)])
    printed = sum((i + 2) * (1 - end) * p for i, (end, p) in enumerate(zip(ends, right, strict=True)))
    assert abs(printed - tokens.mean()) > 0.03


def test_a_full_tree_of_heads_is_as_large_as_figure_8_says() -> None:
    assert head_nodes([3, 2, 2]) == 3 + 6 + 12


@examples(150)
@given(RATES, st.lists(st.integers(0, 3), min_size=1, max_size=4), step_times())
def test_the_common_length_is_the_enumerated_one(rate: float, limits: list[int], times: StepTimes) -> None:
    def goodput(k: int) -> float:
        lengths = [min(k, limit) for limit in limits]
        tokens = sum(expected_tokens(rate, length) for length in lengths)
        return tokens / float(times.roots_s[max(lengths)] + times.added_s[sum(lengths)])

    best = best_common_length(rate, np.array(limits), times)
    assert goodput(best) == pytest.approx(max(goodput(k) for k in range(4)))
    assert common_goodput(rate, best, np.array(limits), times) == pytest.approx(goodput(best))


@examples(150)
@given(st.lists(st.tuples(RATES, st.integers(0, 3)), min_size=1, max_size=4), step_times())
def test_lengths_per_request_are_the_enumerated_ones(
    batch: list[tuple[float, int]], times: StepTimes
) -> None:
    def goodput(lengths: tuple[int, ...]) -> float:
        tokens = sum(expected_tokens(rate, k) for (rate, _), k in zip(batch, lengths, strict=True))
        return tokens / float(times.roots_s[max(lengths)] + times.added_s[sum(lengths)])

    rates = np.array([rate for rate, _ in batch])
    limits = np.array([limit for _, limit in batch])
    found = tuple(best_lengths(rates, limits, times).tolist())
    vectors = product(*(range(limit + 1) for limit in limits))
    assert all(k <= limit for k, limit in zip(found, limits, strict=True))
    assert goodput(found) == pytest.approx(max(goodput(vector) for vector in vectors))


@given(
    st.lists(st.floats(0.0, 1.0), max_size=8), st.floats(1.0, 5.0), st.floats(0.1, 5.0), st.floats(0.0, 1.0)
)
def test_the_best_prefix_is_the_enumerated_one(
    gains: list[float], tokens: float, seconds: float, token_s: float
) -> None:
    gains = sorted(gains, reverse=True)
    values = [(tokens + sum(gains[:m])) / (seconds + token_s * m) for m in range(len(gains) + 1)]
    by_slots = np.array([seconds + token_s * m for m in range(len(gains) + 1)])
    count, value = best_prefix(np.array(gains), tokens, by_slots)
    assert value == pytest.approx(max(values))
    assert values[count] == pytest.approx(value)


@pytest.mark.parametrize("acceptance", ["global", "request"])
def test_speculation_is_off_where_it_does_not_pay(acceptance: str) -> None:
    policy = make_policy(PolicyConfig(name="smartspec", smartspec_acceptance=acceptance))
    cheap, dear = context(), context(token_s=5e-2)
    assert policy.plan([request(rate=0.6)], cheap)[0].depth > 0
    assert policy.plan([request(rate=0.6)], dear)[0].depth == 0


def test_only_a_rate_per_request_tells_requests_apart() -> None:
    batch = [request("a", rate=0.65), request("b", rate=0.05)]
    for acceptance, differ in (("global", False), ("request", True)):
        policy = make_policy(PolicyConfig(name="smartspec", smartspec_acceptance=acceptance))
        first, second = policy.plan(batch, context())
        assert (first.depth > second.depth) is differ


def test_ahead_of_the_answer_heads_draft_chains() -> None:
    """Of a tree that is sent so nothing is selected, and a full tree would not be one."""
    policy = make_policy(PolicyConfig(name="smartspec", smartspec_ahead=True))
    batch = [request("a", num_heads=4, rate=0.6), request("b", rate=0.6)]
    chains = policy.plan(batch, dataclasses.replace(context(), is_ahead=True))
    assert [plan.width for plan in chains] == [1, 1]
    assert chains[0].depth == chains[1].depth > 0
    assert policy.plan(batch, context())[0].width > 1


def test_what_is_selected_cannot_be_planned_ahead() -> None:
    with pytest.raises(ValidationError, match="smartspec_ahead cannot go with smartspec_acceptance"):
        PolicyConfig(name="smartspec", smartspec_ahead=True, smartspec_acceptance="confidence")


def test_by_confidence_a_draft_is_verified_up_to_the_first_doubtful_token() -> None:
    config = PolicyConfig(name="smartspec", smartspec_acceptance="confidence", confidence_threshold=0.4)
    policy = make_policy(config)
    tree = TokenTree.chain(0, [1, 2, 3], np.log([0.9, 0.3, 0.9]).tolist())
    assert [n.tolist() for n in policy.select([request()], [tree], context())] == [[0, 1]]


@pytest.mark.parametrize("threshold", [0.0, 0.4, 1.0])
def test_by_confidence_a_draft_goes_on_above_the_threshold(threshold: float) -> None:
    """Algorithm 3: R' are the requests whose last confidence is above T, which the first layer always is."""
    config = PolicyConfig(name="smartspec", smartspec_acceptance="confidence", confidence_threshold=threshold)
    (plan,) = make_policy(config).plan([request(max_draft=2)], context())
    assert plan.depth == 2
    for confidence in (1e-9, 0.3, 0.4, 0.401, 0.9, 1.0):
        assert (math.log(confidence) >= plan.stop_token_logp) == (confidence > threshold)
