"""Expected tokens and rows by depth, against sums written out, for few requests and for many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.policies import depth_tokens
from cluster.policies.base import DecodeRequest
from cluster.policies.decode_batch import DecodeBatch
from cluster.policies.depth_tokens import LEAST_CHANCE, PRECISION, tokens_by_depth
from tests.cluster.both_ways import both_ways
from tests.cluster.policies.batches import requests

few_requests = both_ways(depth_tokens, "FEW_REQUESTS", 12)


@given(
    batch=st.lists(requests(), min_size=1, max_size=12),
    deepest=st.integers(1, 8),
    cheap=st.sets(st.sampled_from(["small", "large"])),
)
def test_each_depth_adds_what_is_likely_enough(
    batch: list[DecodeRequest], deepest: int, cheap: set[str]
) -> None:
    expected, drafted = tokens_by_depth(DecodeBatch(batch), deepest, cheap)
    for depth in range(deepest + 1):
        tokens, rows = float(len(batch)), 0.0
        for member in batch:
            rate = min(member.rate, 0.98) if member.drafter else 0.0
            for position in range(1, min(depth, member.max_draft) + 1):
                chance = rate**position
                if chance > LEAST_CHANCE:
                    tokens += chance
                    rows += min(1.0, chance / PRECISION) if member.drafter in cheap else 1.0
        assert expected[depth] == pytest.approx(tokens)
        assert drafted[depth] == pytest.approx(rows)
