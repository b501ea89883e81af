"""Who waits for whom within a micro-batch, as drafters come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.batching.micro_batches import MicroBatches
from cluster.config import SchedulerConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.events import DrafterDraining
from cluster.policies.registry import make_policy
from cluster.requests import State
from cluster.succession import take_over
from tests.cluster.test_core import World

FORWARD_S = CostModel(DEFAULT_PROFILE).verify_seconds(1, 1, 0, drafted=True)


def member(drafter: str, state: State) -> Any:
    return SimpleNamespace(request_id=f"{drafter} {state}", drafter=drafter, state=state, micro_batch=0)


def draft(batches: MicroBatches, latency_s: dict[str, float]) -> None:
    """An iteration with a request of each drafter, whose drafts come that late."""
    requests = {name: member(name, State.DRAFTING) for name in latency_s}
    batches.begin(list(requests.values()), 1.0)
    for name, seconds in latency_s.items():
        batches.drafted([requests[name]], seconds, 1.0 + seconds)


def waits(batches: MicroBatches, one: str, other: str) -> bool:
    """Whether a request of the first may not begin while one of the second is drafted for."""
    return not batches.ready_to_draft([member(one, State.READY), member(other, State.DRAFTING)])


@given(
    # In forwards, so that who is slow does not depend on whether it was.
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0, 2, 4, 6]), min_size=1),
    st.sets(st.sampled_from("abcd")),
    st.integers(1, 3),
)
def test_only_drafters_that_are_there_make_another_slow(
    latencies: dict[str, int], left: set[str], num_steps: int
) -> None:
    batches = MicroBatches(SchedulerConfig(micro_batches="auto"), CostModel(DEFAULT_PROFILE), max_depth=4)
    for _ in range(num_steps):
        draft(batches, {name: number * FORWARD_S for name, number in latencies.items()})
    batches.keep(left)
    quickest = min((latencies[name] for name in latencies.keys() & left), default=0)
    slow = {name for name in latencies.keys() & left if latencies[name] > quickest}
    for one in left:
        for other in left:
            same_part = one == other or not {one, other} & slow
            assert waits(batches, one, other) == same_part


@pytest.mark.parametrize("how", ["lost", "drained", "gone when a policy takes over"])
def test_who_is_gone_makes_nobody_slow(how: str) -> None:
    world = World(1, "fixed", micro_batches="auto")
    batches = world.core.micro_batches
    for _ in range(2):
        draft(batches, {"good": 2 * FORWARD_S, "poor": 0.0})
    assert not waits(batches, "", "good"), "`good` is slow beside `poor`"
    if how == "gone when a policy takes over":
        other = SchedulerCore(world.config, make_policy(world.config.policy), CostModel(DEFAULT_PROFILE))
        first, world.core = world.core, other
        first.is_draining = True
        take_over(other, first, world.now)
        assert other.is_draining, "who drains takes nobody with another policy either"
        world.lose("poor")
        take_over(first, other, world.now)
    else:
        if how == "drained":
            world.handle(DrafterDraining("poor"))
        world.lose("poor")  # whoever runs it says so when it is drained
    assert waits(batches, "", "good")
