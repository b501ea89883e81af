"""A loop that is always full, on a machine where every row counts: speculation must not cost throughput."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.linear_cost import LinearCost
from cluster.stream_messages import Objective
from simulator.acceptance import DraftQuality
from simulator.hardware import DrafterProfile, HardwareProfile, Trips
from simulator.run import Cell, Options
from simulator.systems import Bounds, parse
from simulator.workloads import SimRequest

# A two-core machine with the demo family, rounded: a row of the target takes as long as a draft layer.
SMALL_MACHINE = HardwareProfile(
    name="two-cores",
    target="demo",
    hardware="1x CPU",
    source="measured",
    error="rounded",
    cost=LinearCost(alpha=1.5e-6, gamma=2.6e-4, rho=1e-4, delta=4.5e-3),
    num_slots=1 << 15,
    max_tokens=2048,
    drafters={
        "general": DrafterProfile(
            model="general",
            cost=LinearCost(alpha=2e-7, gamma=3e-5, rho=3e-5, delta=3.2e-4),
            quality=DraftQuality(rate={"code": 0.72, "summary": 0.6}),
        )
    },
    collocated=False,
    overhead_s=1.5e-3,
    trips=Trips(verify_s=6e-4, verify_request_s=4e-5, draft_s=5e-4, draft_request_s=6e-5),
    after_drafting=1.15,
)
# Medians of prompt and output tokens.
LENGTHS = {"code": (110, 55), "summary": (230, 18)}


def seconds(system: str, kind: str, concurrency: int, count: int) -> float:
    """Until all requests, present from the start, have their answers; so many are served at once."""
    rng = np.random.default_rng(1)
    bounds = Bounds(max_running=concurrency, prefill_chunk=64)
    cell = Cell(SMALL_MACHINE, parse(system, bounds), Options(seed=1))
    for number in range(count):
        num_prompt, num_output = (max(4, int(rng.lognormal(np.log(median), 0.4))) for median in LENGTHS[kind])
        cell.submit(
            SimRequest(f"{kind}-{number}", kind, 0.0, num_prompt, num_output, Objective(), seed=number)
        )
    cell.run()
    assert len(cell.receipts) == count
    return max(ended_s for ended_s, _ in cell.receipts.values())


@pytest.mark.parametrize(
    ("kind", "concurrency"),
    [("summary", 8), pytest.param("summary", 32, marks=pytest.mark.thorough), ("code", 32)],
)
def test_where_drafts_do_not_pay_nothing_is_lost(kind: str, concurrency: int) -> None:
    plain_s = seconds("autoregressive/flotilla", kind, concurrency, 48)
    assert seconds("flotilla", kind, concurrency, 48) < 1.02 * plain_s
    # There is something to lose: a policy that drafts all the same takes longer.
    assert seconds("fixed-3/flotilla", kind, concurrency, 48) > 1.06 * plain_s


def test_where_drafts_pay_they_are_made() -> None:
    assert 1.3 * seconds("flotilla", "code", 1, 12) < seconds("autoregressive/flotilla", "code", 1, 12)
