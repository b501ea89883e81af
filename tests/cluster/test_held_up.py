"""When a drafter's answer changes nothing: then nobody may begin an iteration either."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.batching.micro_batches import MicroBatches
from cluster.config import SchedulerConfig
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.requests import State


def micro_batches(count: int) -> MicroBatches:
    return MicroBatches(SchedulerConfig(micro_batches=count), CostModel(DEFAULT_PROFILE), max_depth=4)


def running(*states: State) -> list[Any]:
    return [SimpleNamespace(state=state, micro_batch=0, drafter="small") for state in states]


@given(st.lists(st.sampled_from(State), max_size=6))
def test_nobody_begins_while_the_only_micro_batch_is_held_up(states: list[State]) -> None:
    of_batch = running(*states)
    batches = micro_batches(1)
    if batches.is_held_up(of_batch):
        assert batches.ready_to_draft(of_batch) == []
    else:
        assert not {State.DRAFTING, State.VERIFYING}.intersection(states)


@pytest.mark.parametrize("state", [State.DRAFTING, State.VERIFYING])
def test_of_two_micro_batches_one_may_go_on(state: State) -> None:
    assert micro_batches(1).is_held_up(running(state, State.DRAFTED))
    assert not micro_batches(2).is_held_up(running(state, State.DRAFTED))
