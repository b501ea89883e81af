"""What policies by goodput reckon a step to cost, against the cost model asked directly for every length.

Machines have a knee, and steps with drafts take longer than the profile says: the baselines must know of both
what the default policy knows, or they draft too little beside it, or too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cluster.config import PolicyConfig
from cluster.cost_model import VERIFY_DRAFTED, VERIFY_PLAIN, CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.policies.base import DecodeRequest, Policy, StepContext
from cluster.policies.registry import make_policy
from engine.tree import TokenTree
from selector.acceptance import expected_tokens
from tests.cluster.policies.batches import context, request
from tests.examples import examples

DEEPEST = 3


def machine(*, knee: int, past_s: float, drafted: float = 1.0, plain: float = 1.0) -> StepContext:
    """Seconds of each token past the knee, and what forwards take as multiples of what the profile says."""
    profile = CostProfile(
        target=LinearCost(gamma=1e-5, delta=1e-2, beta=1e-8, gamma_knee=past_s, knee_tokens=knee),
        drafters={"small": LinearCost(gamma=1e-5, delta=5e-4), "large": LinearCost(gamma=1e-5, delta=3e-3)},
    )
    corrections = {VERIFY_DRAFTED: drafted, VERIFY_PLAIN: plain}
    return replace(context(), cost=CostModel.corrected(profile, corrections, {}))


def step_s(batch: Sequence[DecodeRequest], lengths: Sequence[int], now: StepContext) -> float:
    """Seconds of a step with chains of these lengths, by the cost model."""
    n, num_context = len(batch), sum(one.num_context for one in batch)
    deepest = max(lengths)
    verify_s = now.cost.verify_seconds(n, n + sum(lengths), num_context, drafted=deepest > 0)
    if deepest == 0:
        return now.plain_overhead_s + verify_s
    slowest_s = 0.0  # at the same time, each to the deepest of its own
    for name in {one.drafter for one in batch if one.drafter}:
        mine = [(one.num_context, k) for one, k in zip(batch, lengths, strict=True) if one.drafter == name]
        layers = max(k for _, k in mine)
        draft_s = now.cost.draft_seconds(name, len(mine), 1, layers, sum(tokens for tokens, _ in mine))
        slowest_s = max(slowest_s, draft_s)
    return now.draft_overhead_s + slowest_s + verify_s


def goodput(batch: Sequence[DecodeRequest], lengths: Sequence[int], now: StepContext) -> float:
    tokens = sum(expected_tokens(one.rate, k) for one, k in zip(batch, lengths, strict=True))
    return tokens / step_s(batch, lengths, now)


machines = st.builds(
    machine,
    knee=st.sampled_from([0, 2, 5, 100]),
    past_s=st.sampled_from([0.0, 1e-3, 1e-2]),
    drafted=st.sampled_from([1.0, 1.5, 3.0]),
    plain=st.sampled_from([0.7, 1.0]),
)
batches = st.lists(
    st.builds(
        request,
        rate=st.sampled_from([0.2, 0.5, 0.8, 0.95]),
        max_draft=st.integers(1, 4),
        # The third is a lookup, which takes no time.
        drafter=st.sampled_from(["small", "large", "lookup"]),
    ),
    min_size=1,
    max_size=3,
)


@examples(100)
@given(batches, machines)
def test_smartspec_lengths_per_request_are_the_best_by_the_cost_model(
    batch: list[DecodeRequest], now: StepContext
) -> None:
    policy = make_policy(PolicyConfig(name="smartspec", smartspec_acceptance="request", max_depth=DEEPEST))
    found = [plan.depth for plan in policy.plan(batch, now)]
    lengths = product(*(range(min(DEEPEST, one.max_draft) + 1) for one in batch))
    assert goodput(batch, found, now) == pytest.approx(max(goodput(batch, each, now) for each in lengths))


@examples(100)
@given(batches, st.sampled_from([0.2, 0.5, 0.8, 0.95]), machines)
def test_smartspec_takes_the_best_common_length_by_the_cost_model(
    batch: list[DecodeRequest], rate: float, now: StepContext
) -> None:
    batch = [structs.replace(one, rate=rate) for one in batch]
    policy = make_policy(PolicyConfig(name="smartspec", smartspec_acceptance="global", max_depth=DEEPEST))
    found = [plan.depth for plan in policy.plan(batch, now)]
    common = ([min(k, one.max_draft) for one in batch] for k in range(DEEPEST + 1))
    assert goodput(batch, found, now) == pytest.approx(max(goodput(batch, each, now) for each in common))


@pytest.mark.parametrize("acceptance", ["global", "request"])
def test_chains_do_not_pay_for_what_heads_draft(acceptance: str) -> None:
    """Each kind is decided on as if the other just decoded; the heads' drafter may be the slower one."""
    policy = make_policy(PolicyConfig(name="smartspec", smartspec_acceptance=acceptance))
    now, chain = machine(knee=100, past_s=1e-2), request("chain", rate=0.8)
    heads = request("heads", drafter="large", rate=0.5, num_heads=3, max_draft=3)
    plain = structs.replace(heads, drafter="", max_draft=0, num_heads=0)
    assert policy.plan([chain, heads], now)[0] == policy.plan([chain, plain], now)[0]


@examples(100)
@given(st.integers(1, 4), st.sampled_from([0.62, 0.92]), machines)
@pytest.mark.parametrize(
    "policy",
    [
        make_policy(PolicyConfig(name="adaptive-verification")),
        make_policy(PolicyConfig(name="smartspec", smartspec_acceptance="confidence")),
    ],
)
def test_so_many_draft_tokens_are_verified_as_are_best_by_the_cost_model(
    policy: Policy, num_requests: int, chance: float, now: StepContext
) -> None:
    batch = [request(str(i)) for i in range(num_requests)]
    trees = [TokenTree.chain(0, [1, 2, 3], np.log([chance] * 3).tolist())] * num_requests
    confident = isinstance(policy, type(make_policy(PolicyConfig(name="smartspec"))))
    table = now.calibration.of("small").apply(np.array([chance]))
    accepted = 1.0 if confident else float(table[0])
    gains = sorted([accepted**depth for depth in (1, 2, 3)] * num_requests, reverse=True)
    num_context = sum(one.num_context for one in batch)

    def of(num_drafted: int) -> float:
        rows = num_requests + num_drafted
        verify_s = now.cost.verify_seconds(num_requests, rows, num_context, drafted=True)
        seconds = now.draft_s + now.draft_overhead_s + verify_s
        return (num_requests + sum(gains[:num_drafted])) / seconds

    found = sum(len(nodes) - 1 for nodes in policy.select(batch, trees, now))
    assert of(found) == pytest.approx(max(of(m) for m in range(len(gains) + 1)))


def test_below_the_knee_smartspec_drafts_as_deep_as_where_no_knee_is() -> None:
    """An A100 reads a 70B model's weights in the time of some hundred tokens: drafts are free."""
    target = LinearCost(alpha=5e-8, beta=4e-9, gamma=7e-5, delta=2.8e-2, gamma_knee=1.5e-3, knee_tokens=128)
    drafters = {"small": LinearCost(delta=5e-4)}
    batch = [request(str(i), rate=0.7) for i in range(8)]
    depths = []
    for gamma_knee in (0.0, target.gamma_knee):
        cost = CostModel(
            CostProfile(
                target=LinearCost(
                    alpha=target.alpha,
                    beta=target.beta,
                    gamma=target.gamma,
                    delta=target.delta,
                    gamma_knee=gamma_knee,
                    knee_tokens=target.knee_tokens,
                ),
                drafters=drafters,
            )
        )
        policy = make_policy(PolicyConfig(name="smartspec", max_depth=8))
        depths.append([plan.depth for plan in policy.plan(batch, replace(context(), cost=cost))])
    assert depths[0] == depths[1]
