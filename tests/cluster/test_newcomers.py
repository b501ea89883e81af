"""A refusal costs the scheduler as little as may be: where it would stand is worked out once."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from benchmarks.refusal_cost import TIERS, OverloadedCell
from cluster.batching.batcher import Batcher
from cluster.batching.fair_queue import FairQueue
from cluster.events import Cancelled, Reject, RequestArrived
from cluster.forecast import Forecast
from cluster.newcomer import on_terms
from cluster.stream_messages import Rejected, Tenant, Terms
from tests.cluster.counted_calls import counting


@pytest.fixture
def overloaded() -> OverloadedCell:
    cell = OverloadedCell(4, 16, seed=1)
    cell.run(60)
    return cell


def arrivals(cell: OverloadedCell, count: int, counted: Counter[str]) -> Counter[tuple[str, int]]:
    """How many of so many requests are refused by which code, empty if none, after so many counted calls."""
    found = Counter[tuple[str, int]]()
    while found.total() < count:
        before = counted.total()
        event, actions, _ = cell.next()
        if isinstance(event, RequestArrived):
            cell.next_arrives()
            codes = [action.rejection.code for action in actions if isinstance(action, Reject)]
            found["".join(codes), counted.total() - before] += 1
    return found


def test_the_queue_is_put_in_order_once_for_a_refusal(
    overloaded: OverloadedCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for the newcomer's sake where the queue is full."""
    calls = Counter[str]()
    monkeypatch.setattr(Batcher, "ahead_of", counting(Batcher.ahead_of, calls))
    found = arrivals(overloaded, 400, calls)
    assert found.keys() == {("saturated", 1), ("queue_full", 0), ("", 1)}
    assert min(found.values()) > 20


def test_nobody_is_asked_whether_to_begin_because_of_a_refusal(
    overloaded: OverloadedCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[str]()
    monkeypatch.setattr(FairQueue, "admit", counting(FairQueue.admit, calls))
    found = arrivals(overloaded, 400, calls)
    assert found.keys() == {("saturated", 0), ("queue_full", 0), ("", 1)}
    assert min(found.values()) > 20


def test_when_the_queue_will_be_shorter_is_worked_out_once_for_refusals_in_a_row(
    overloaded: OverloadedCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands may come in a second, between two answers of the target; and anew after one."""
    core, calls = overloaded.core, Counter[str]()
    asked = msgspec.structs.replace(core.waiting[0].submit, on_miss="serve", tenant=Tenant(), tier="chat")

    def told(number: int) -> Rejected | None:
        event = RequestArrived(msgspec.structs.replace(asked, request_id=f"more {number}"), "client")
        actions = core.handle(event, overloaded.now)
        return next((action.rejection for action in actions if isinstance(action, Reject)), None)

    while told(calls.total()) is None:
        calls["taken"] += 1
    monkeypatch.setattr(Forecast, "schedule", counting(Forecast.schedule, calls))
    answers = [told(1000 + number) for number in range(200)]
    assert {answer.code for answer in answers if answer is not None} == {"queue_full"}
    assert None not in answers
    assert calls["schedule"] == 0  # that of the one refused before is still true
    core.handle(Cancelled(core.waiting[-1].request_id), overloaded.now)
    assert told(2000) is None
    calls.clear()
    assert [told(3000 + number) is None for number in range(100)] == [False] * 100
    assert calls["schedule"] == 1


def test_terms_change_what_is_promised_and_nothing_else(overloaded: OverloadedCell) -> None:
    submit = overloaded.core.waiting[0].submit
    lower = Terms(tier="batch", objective=TIERS["batch"].objective, priority=10)
    lowered = on_terms(submit, lower)
    assert (lowered.tier, lowered.objective, lowered.priority) == ("batch", lower.objective, 10)
    back = Terms(tier=submit.tier, objective=submit.objective, priority=submit.priority)
    assert msgspec.structs.replace(on_terms(lowered, back)) == submit
