"""Fair queueing between API keys against accounts kept apart from it: what each key really was served."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.batching.fair_queue import FairQueue
from cluster.batching.registry import BATCHING_RULES, make_rule
from cluster.config import FlotillaConfig
from cluster.requests import Request, State, Trigger
from cluster.stream_messages import NOBODY, Submit, Tenant
from engine.sampling_params import SamplingParams
from tests.cluster.batch_states import context
from tests.examples import examples

PLACES = 4
MOST_PROMPT, MOST_OUTPUT = 60, 24
OUTPUT_COST = 2.0
# Rules that admit whoever is next while there is room, so that all places can be used up.
RULES = ("fcfs", "flotilla", "priority", "sarathi", "stta")


@dataclass
class Machine:
    """Places that requests take turns on; each running one gets some tokens a step."""

    rule: str
    fair: FairQueue
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    num_made: int = 0

    def submit(
        self, tenant: Tenant, prompt: int, output: int, priority: int = 0, tier: str = "default"
    ) -> None:
        made = Submit(
            request_id=f"{tenant.label}{self.num_made}",
            prompt=[1] * prompt,
            sampling=SamplingParams(max_tokens=output),
            tenant=tenant,
            priority=priority,
            tier=tier,
        )
        self.waiting.append(Request(made, "client", self.now, self.num_made))
        self.waiting.sort(key=lambda request: (request.submit.priority, request.order))
        self.num_made += 1

    def step(self, num_tokens: int = 2) -> None:
        limits = context(max_running=PLACES, free_slots=100_000, now=self.now)
        before = list(self.waiting)
        answer = self.fair.admit(make_rule(self.rule), self.waiting, self.running, limits)
        for request in answer.preempted:
            request.preempt()
            self.running.remove(request)
            self.waiting.append(request)
        for request in answer.admitted:
            self.waiting.remove(request)
            request.advance(Trigger.ADMITTED)
            self.running.append(request)
            self.admitted.append(request.request_id)
            self._serve(request, request.num_prompt if not request.num_preemptions else 0)
            request.num_computed = request.num_tokens
            request.state = State.READY
        if before:
            assert len(self.running) == PLACES or not self.waiting, "a place is free and somebody waits"
        for request in list(self.running):
            tokens = min(num_tokens, request.num_remaining)
            request.extend([1] * tokens)
            self._serve(request, OUTPUT_COST * tokens)
            if request.num_remaining == 0:
                request.state = State.FINISHED
                self.running.remove(request)
        self.now += 0.02

    def _serve(self, request: Request, cost: float) -> None:
        tenant = request.submit.tenant
        self.served[tenant.label] = self.served.get(tenant.label, 0.0) + cost / tenant.weight


tenants = st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=4).map(
    lambda weights: [Tenant(label=chr(97 + n), weight=weight) for n, weight in enumerate(weights)]
)
sizes = st.tuples(st.integers(1, MOST_PROMPT), st.integers(1, MOST_OUTPUT))


def bound(competing: list[Tenant]) -> float:
    """Twice the largest prompt, or what all places may still yield: the bound of the paper."""
    largest = max(MOST_PROMPT, OUTPUT_COST * PLACES * MOST_OUTPUT)
    return 2 * largest / min(tenant.weight for tenant in competing)


def backlogged(machine: Machine, competing: list[Tenant], draws: list[tuple[int, int]], steps: int) -> float:
    """The largest difference of service while all have requests waiting, the first ten times as many."""
    taken, worst = 0, 0.0
    for _ in range(steps):
        for number, tenant in enumerate(competing):
            label = tenant.label
            has = sum(request.submit.tenant.label == label for request in machine.waiting)
            for _ in range(max(0, (60 if number == 0 else PLACES + 2) - has)):
                machine.submit(tenant, *draws[taken % len(draws)])
                taken += 1
        machine.step()
        served = [machine.served.get(tenant.label, 0.0) for tenant in competing]
        worst = max(worst, max(served) - min(served))
    return worst


@examples(8)
@given(st.sampled_from(RULES), tenants, st.lists(sizes, min_size=1, max_size=8))
def test_service_of_backlogged_keys_differs_by_a_constant(
    rule: str, competing: list[Tenant], draws: list[tuple[int, int]]
) -> None:
    machine = Machine(rule, FairQueue(output_cost=OUTPUT_COST))
    assert backlogged(machine, competing, draws, 60) <= bound(competing)


def test_without_fair_queueing_the_greedy_key_takes_all() -> None:
    """The bound is one that can be broken: in arrival order who sends most gets most."""
    competing, draws = [Tenant("a"), Tenant("b")], [(MOST_PROMPT, MOST_OUTPUT)]
    fair = backlogged(Machine("fcfs", FairQueue()), competing, draws, 100)
    unfair = backlogged(Machine("fcfs", FairQueue(is_enabled=False)), competing, draws, 100)
    assert fair <= bound(competing) < unfair


@examples(8)
@given(st.sampled_from(RULES), st.lists(sizes, min_size=1, max_size=12), st.integers(1, 10))
def test_a_light_key_is_admitted_next(rule: str, draws: list[tuple[int, int]], after: int) -> None:
    """Who comes back now and then waits for one place, whatever the others have waiting."""
    machine = Machine(rule, FairQueue(output_cost=OUTPUT_COST))
    for number in range(120):
        machine.submit(Tenant("greedy"), *draws[number % len(draws)])
    for _ in range(after):
        machine.step()
    for _ in range(3):
        machine.submit(Tenant("light"), 1, 1)
        begun = len(machine.admitted)
        while not any(name.startswith("light") for name in machine.admitted[begun:]):
            machine.step()
        assert machine.admitted[begun].startswith("light")
        for _ in range(MOST_OUTPUT):  # what the light one was charged is made up for meanwhile
            machine.submit(Tenant("greedy"), *draws[0])
            machine.step()


@examples(15)
@given(
    st.sampled_from(sorted(BATCHING_RULES)),
    st.sampled_from([NOBODY, Tenant("only", 2.0)]),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 24), st.integers(-1, 2)), min_size=1, max_size=20),
)
def test_one_key_is_served_as_by_the_rule_alone(
    rule: str, tenant: Tenant, draws: list[tuple[int, int, int]]
) -> None:
    orders = []
    for who, fair in ((tenant, FairQueue()), (NOBODY, FairQueue(is_enabled=False))):
        machine = Machine(rule, fair)
        machine_limits = context(max_running=PLACES, free_slots=1000)
        for prompt, output, priority in draws:
            machine.submit(who, prompt, output, priority)
        answer = fair.admit(make_rule(rule), machine.waiting, [], machine_limits)
        ordered = fair.in_order(make_rule(rule), machine.waiting, machine_limits)
        orders.append([[r.order for r in part] for part in (answer.admitted, answer.preempted, ordered)])
    assert orders[0] == orders[1]


@examples(8)
@given(st.sampled_from(RULES), tenants, st.lists(sizes, min_size=1, max_size=8))
def test_everybody_ends_and_nothing_is_kept(
    rule: str, competing: list[Tenant], draws: list[tuple[int, int]]
) -> None:
    """No starvation, the same order every time, and no accounts of tenants that are gone."""
    orders = []
    for _ in range(2):
        machine = Machine(rule, FairQueue(output_cost=OUTPUT_COST))
        for number, (prompt, output) in enumerate(draws * 4):
            machine.submit(competing[number % len(competing)], prompt, output, number % 3)
        for _ in range(len(draws) * 4 * MOST_OUTPUT):
            machine.step()
        assert not machine.waiting
        assert not machine.running
        orders.append(machine.admitted)
        for number in range(50):  # keys come and go for ever
            machine.submit(Tenant(f"t{number}"), 1, 1)
            machine.step()
        assert len(machine.fair.counters) <= PLACES + 1
        assert len(machine.fair._charged) <= PLACES
    assert orders[0] == orders[1]


def test_tiers_weigh_as_configured() -> None:
    config = FlotillaConfig.model_validate(
        {
            "target": {"path": "zoo:demo"},
            "tiers": {"bulk": {"priority": 10}, "own": {"weight": 5}},
        }
    )
    weight = FairQueue.of(config).tier_weight
    # A tier's priority does not count: it would be held against the other requests of the key.
    assert [weight(tier) for tier in ("bulk", "own", "none")] == [1.0, 5.0, 1.0]
    machine = Machine("sarathi", FairQueue(weight))
    for _ in range(120):
        machine.submit(Tenant("a"), 10, 4, tier="own")
        machine.submit(Tenant("b"), 10, 4, tier="none")
    for _ in range(60):
        machine.step()
    num = [sum(name.startswith(label) for name in machine.admitted) for label in "ab"]
    assert num[0] / num[1] == pytest.approx(5.0, rel=0.1)


def test_no_credit_is_saved_up_by_staying_away() -> None:
    machine = Machine("fcfs", FairQueue())
    for _ in range(200):
        machine.submit(Tenant("a"), 10, 4)
    for _ in range(50):
        machine.step()
    begun = len(machine.admitted)
    for _ in range(60):
        machine.submit(Tenant("b"), 10, 4)
    while sum(name.startswith("b") for name in machine.admitted) < 20:
        machine.step()
    since = machine.admitted[begun:]
    assert sum(name.startswith("a") for name in since) >= 15  # b came late and gets half, not all


def test_messages_of_older_front_ends_are_understood() -> None:
    new = Submit(request_id="r", prompt=[1], sampling=SamplingParams(), tenant=Tenant("a", 2.0))
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(new))
    assert packed.pop("tenant") == {"label": "a", "weight": 2.0}
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=Submit)
    assert old.tenant == NOBODY
