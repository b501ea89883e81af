"""Who is served when not all can be: sufficient chains against enumeration, and the choice of requests."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.policies import triage
from cluster.policies.goodput import chain_tokens
from cluster.policies.horizon import required_tokens
from cluster.policies.triage import LENGTHS, chain_rows, needs
from tests.cluster.both_ways import both_ways
from tests.cluster.policies.batches import context, request

few_requests = both_ways(triage, "FEW_REQUESTS", 12)


@given(
    rate=st.floats(0.0, 0.98),
    depth=st.integers(0, 8),
    share=st.floats(0.0, 1.0),
)
def test_the_chain_is_the_shortest_that_suffices(rate: float, depth: int, share: float) -> None:
    def tokens(length: int) -> float:
        return float(chain_tokens(np.array([rate]), np.array([length]))[0])

    required = share * tokens(depth)
    rows = int(chain_rows(np.array([rate]), np.array([required]))[0])
    assert tokens(rows) >= required - 1e-6
    assert rows == 0 or tokens(rows - 1) <= required + 1e-6


@given(
    paces=st.lists(st.sampled_from([0.008, 0.015, 0.03, 0.1, None]), min_size=1, max_size=12),
    late_s=st.lists(st.sampled_from([0.0, 0.05, 5.0]), min_size=12, max_size=12),
)
def test_the_cheapest_are_served_and_the_hopeless_are_not(
    paces: list[float | None], late_s: list[float]
) -> None:
    batch = [
        request(str(n), tpot_s=tpot_s, num_decoded=20, decoding_s=20 * (tpot_s or 0.1) + late_s[n])
        for n, tpot_s in enumerate(paces)
    ]
    need = needs(batch, context(), 0.0, 8, 0.0)
    most = float(chain_tokens(np.array([0.7]), np.array([8]))[0])
    assert (need >= 0.0).all()
    assert (need <= most + 1e-9).all()
    for member, tokens in zip(batch, need.tolist(), strict=True):
        assert tokens == 0.0 or member.tpot_s is not None
        if member.tpot_s is not None and member.decoding_s > 4.0 and member.tpot_s < 0.05:
            assert tokens == 0.0  # 64 tokens of its objective are less than it is late by


@given(paces=st.lists(st.floats(0.006, 0.08), min_size=1, max_size=12), token_s=st.sampled_from([5e-4, 4e-3]))
def test_no_fewer_are_served_than_in_order_of_descending_need(paces: list[float], token_s: float) -> None:
    batch = [
        request(str(n), tpot_s=tpot_s, num_decoded=20, decoding_s=20 * tpot_s)
        for n, tpot_s in enumerate(paces)
    ]
    step, n = context(token_s=token_s), len(batch)
    served = int((needs(batch, step, 0.0, 8, 0.0) > 0.0).sum())
    wanted = sorted(
        (required_tokens(member, step.step_s, 0.0) / step.step_s for member in batch), reverse=True
    )
    roots_s = step.cost.verify_seconds(n, n, 50 * n, drafted=True)
    for step_s in roots_s * LENGTHS:
        left_s, count = step_s - roots_s, 0
        for pace in wanted:
            chain = next(
                (k for k in range(9) if sum(0.7**d for d in range(k + 1)) >= pace * step_s - 1e-9), None
            )
            if pace > 0.0 and chain is not None and chain * (token_s + 1e-12) <= left_s - 1e-9:
                left_s -= chain * token_s
                count += 1
        assert served >= count
