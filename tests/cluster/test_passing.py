"""Who comes later and begins before: as fair queueing then decides."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.arrival_rates import ArrivalRates
from cluster.batching.common import arrival_order
from cluster.batching.fair_queue import FairQueue
from cluster.batching.registry import make_rule
from cluster.passing import DUE_S, Passing, expected
from cluster.promises import Promises
from cluster.requests import Request
from cluster.stream_messages import Submit, Tenant
from engine.sampling_params import SamplingParams
from tests.cluster.batch_states import context
from tests.cluster.counted_calls import counting

LABELS = ("a", "b", "c")


def request(label: str, order: int, size: int = 1, *, weight: float = 1.0, priority: int = 0) -> Request:
    asked = Submit(
        request_id=f"{label}{order}",
        prompt=[1] * (2 * size),
        sampling=SamplingParams(max_tokens=3 * size),
        tenant=Tenant(label, weight),
        priority=priority,
    )
    return Request(asked, "client", 0.0, order)


@st.composite
def queues(draw: st.DrawFn) -> tuple[FairQueue, list[Request], Request, Request]:
    """A queue in which tenants had some waiting, a newcomer, and what another tenant goes on sending."""
    weights = {label: draw(st.sampled_from([0.5, 1.0, 2.0])) for label in LABELS}
    drawn = draw(st.lists(st.tuples(st.sampled_from(LABELS), st.integers(1, 4)), max_size=8))
    waiting = [request(label, n, size, weight=weights[label]) for n, (label, size) in enumerate(drawn)]
    own, other = draw(st.permutations(LABELS))[:2]
    newcomer = request(own, 100, draw(st.integers(1, 4)), weight=weights[own])
    later = request(other, 1000, draw(st.integers(1, 4)), weight=weights[other])
    fair = FairQueue()
    fair.counters = {label: float(draw(st.integers(0, 40))) for label in LABELS}
    # All who wait have waited before: who comes later is then raised to the lowest of them.
    fair._backlogged = frozenset(one.submit.tenant.label for one in [*waiting, newcomer])
    return fair, waiting, newcomer, later


@given(queues())
def test_turns_of_another_tenant_are_those_it_then_gets(
    drawn: tuple[FairQueue, list[Request], Request, Request],
) -> None:
    fair, waiting, newcomer, later = drawn
    ordered = fair.in_order(make_rule("fcfs"), [*waiting, newcomer], context())
    ahead = ordered[: ordered.index(newcomer)]
    label = later.submit.tenant.label
    turns = fair.turns_before(newcomer, ahead, waiting, {label: fair.charge(later.submit)})
    coming = [Request(later.submit, "client", 0.0, 1000 + n) for n in range(400)]
    whole = sorted([*waiting, newcomer, *coming], key=arrival_order)
    then = fair.in_order(make_rule("fcfs"), whole, context())
    passed = set(coming).intersection(then[: then.index(newcomer)])
    assert turns == {label: len(passed)}


def rates(*flows: tuple[str, int]) -> ArrivalRates:
    found = ArrivalRates()
    for label, priority in flows:
        found.took(label, priority, 8.0, 0.0)
    return found


def found(newcomer: Request, flows: ArrivalRates, waiting: list[Request], *, enabled: bool = True) -> Passing:
    fair = FairQueue(is_enabled=enabled)
    return expected(newcomer, waiting, waiting, fair, flows, Promises(60.0), 0.0, is_promised=False)


def test_of_its_own_tenant_only_higher_priorities_pass_and_without_end() -> None:
    flows = rates(("a", -1), ("a", 0), ("a", 1))
    (urgent, *_) = flows.flows(0.0)
    passing = found(request("a", 1), flows, [])
    assert passing.rate == urgent.rate
    assert passing.bounded == ()
    assert passing.number(1000.0) >= 1000.0 * urgent.rate


def test_of_others_each_that_has_nobody_waiting_has_a_turn_for_each_of_its_own() -> None:
    waiting = [request("a", 1), request("a", 2)]
    passing = found(request("a", 3), rates(("b", 0), ("c", 5)), waiting)
    assert passing.rate == 0.0
    assert [most for _, most in passing.bounded] == [3, 3]
    assert passing.number(1e6) == 6.0


def test_where_keys_are_not_told_apart_only_priorities_count() -> None:
    flows = rates(("b", -1), ("c", 0))
    passing = found(request("a", 3), flows, [request("a", 1)], enabled=False)
    assert passing.bounded == ()
    assert passing.rate == flows.flows(0.0)[0].rate


def test_nobody_passes_where_nobody_came() -> None:
    assert found(request("a", 1), ArrivalRates(), []).is_nobody
    assert Passing().number(100.0) == 0.0


def test_of_each_tenant_those_told_to_come_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of keys, each with some told to come soon: not all promises are read again for every key."""
    labels = [f"key{number}" for number in range(200)]
    told, flows = Promises(60.0), rates(*((label, 0) for label in labels))
    for label in labels[:100]:
        assert told.make(request(label, 0).submit, 0.0, 1e-4, 0.0, may_be_near=True) == 1.0
    looks = Counter[str]()
    for method in (Promises.num_due, Promises.num_due_of_each):
        monkeypatch.setattr(Promises, method.__name__, counting(method, looks))
    waiting = [request("a", 1)]
    passing = expected(request("a", 3), waiting, waiting, FairQueue(), flows, told, 0.0, is_promised=False)
    assert looks == {"num_due": 1, "num_due_of_each": 1}
    taken = flows.flows(0.0)[0].rate
    due = [1.0 / DUE_S] * 100 + [0.0] * 100
    assert passing.bounded == tuple((taken + rate, 2) for rate in due)


@pytest.mark.parametrize("deviations", [0.0, 1.0])
def test_the_number_grows_up_to_its_bounds(deviations: float) -> None:
    passing = Passing(0.0, ((2.0, 3), (1.0, 1)), deviations)
    numbers = [passing.number(seconds / 10) for seconds in range(100)]
    assert numbers[0] == 0.0
    assert numbers[-1] == 4.0
    assert Passing(4.0, (), 1.0).number(25.0) == 110.0
