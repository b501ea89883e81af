"""Steps are sent ahead also while somebody waits for a place, unless that may be taken from one who runs."""

from __future__ import annotations

import pytest

from cluster.stream_messages import Objective, Submit
from tests.cluster.ahead_world import AheadWorld, ends, is_ahead


def waiting_beside(batching: str, *, priority: int = 0, objective: Objective | None = None) -> AheadWorld:
    """One request decodes in the only place there is, another waits for it."""
    world = AheadWorld(1, max_running=1, batching=batching)
    first = Submit(request_id="first", prompt=[3] * 10, sampling=ends(30), priority=1)
    world.send(first)
    while not world.output.get("first"):
        assert world.answer_one()
    asked = {} if objective is None else {"objective": objective}
    world.send(Submit(request_id="second", prompt=[4] * 10, sampling=ends(9), priority=priority, **asked))
    return world


@pytest.mark.parametrize("batching", ["flotilla", "sarathi", "fcfs"])
def test_who_waits_for_a_place_holds_nobody_up(batching: str) -> None:
    world = waiting_beside(batching, priority=1)
    before = len(world.calls)
    world.drain()
    world.check_ends()
    alone = next(i for i, call in enumerate(world.calls) if i >= before and call.prefill)
    assert alone - before > 20
    assert all(map(is_ahead, world.calls[before:alone]))
    assert world.core.totals.preemptions == 0


@pytest.mark.parametrize(
    ("batching", "objective"), [("priority", None), ("flotilla", Objective(ttft_ms=40.0))]
)
def test_a_place_is_taken_soon_nevertheless(batching: str, objective: Objective | None) -> None:
    """From one who is in no call, so that calls are sent in turn now and then."""
    world = waiting_beside(batching, objective=objective)
    before = len(world.calls)
    while world.core.totals.preemptions == 0:
        assert world.answer_one()
    assert any(map(is_ahead, world.calls[before:]))
    assert "second" in world.core.running
    world.drain()
    world.check_ends()


def test_a_place_that_is_free_is_taken_at_once() -> None:
    """It is free when an answer says so, and the prompt is in the call that is sent then."""
    world = waiting_beside("flotilla", priority=1)
    while "second" not in world.core.running:
        assert world.answer_one()
    reading = next(i for i, call in enumerate(world.calls) if i > 1 and call.prefill)
    assert world.calls[reading].release == ["first"]
    assert world.calls[reading - 1].verify[0].request_id == "first"
    world.drain()
    world.check_ends()
