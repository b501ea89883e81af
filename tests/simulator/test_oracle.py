"""The oracle's depth against the cost model asked for every depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from cluster.config import PolicyConfig
from cluster.cost_model import VERIFY_DRAFTED, CostModel
from cluster.policies.base import DecodeRequest
from simulator.oracle import Oracle
from tests.cluster.policies.batches import context, request


class Knowing(Oracle):
    """Three tokens of every request's draft will be accepted."""

    def __init__(self) -> None:
        super().__init__(PolicyConfig(), cast(Any, None), {})

    def _run(self, request: DecodeRequest) -> int:
        return 3


@pytest.mark.parametrize("slowed", [1.0, 1.5, 3.0, 10.0])
def test_it_knows_that_forwards_after_drafting_take_longer(slowed: float) -> None:
    plain = context()
    now = replace(plain, cost=CostModel.corrected(plain.cost.profile, {VERIFY_DRAFTED: slowed}, {}))

    def goodput(depth: int) -> float:
        verify_s = now.cost.verify_seconds(1, 1 + depth, 50, drafted=depth > 0)
        draft_s = depth * now.cost.draft_layer_seconds("small", 1, 1, 50)
        overhead_s = now.draft_overhead_s if depth else now.plain_overhead_s
        return (1 + depth) / (verify_s + draft_s + overhead_s)

    (plan,) = Knowing().plan([request()], now)
    assert plan.depth == max(range(4), key=goodput)
