"""What a request's share of a step is worth, in seconds of reading."""

from __future__ import annotations

import pytest

from cluster.cost_model import VERIFY_DRAFTED, CostModel, CostProfile
from cluster.drafting_time import READ_SHARE, seconds_to_read
from cluster.linear_cost import LinearCost
from cluster.policies.decode_batch import DecodeBatch
from tests.cluster.policies.batches import request


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_reading_first_may_take_a_part_of_what_the_request_has_of_the_step(num_requests: int) -> None:
    target = LinearCost(gamma=1e-4, delta=9e-3)
    cost = CostModel.corrected(CostProfile(target=target), {VERIFY_DRAFTED: 1.2}, {})
    batch = DecodeBatch([request(request_id=f"r{number}") for number in range(num_requests)])
    step_s = 1.2 * (9e-3 + 1e-4 * num_requests) + 2e-3
    assert seconds_to_read(cost, batch, 2e-3) == pytest.approx(READ_SHARE * step_s / num_requests)
