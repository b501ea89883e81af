"""Micro-batches on an event clock: overlap, no idle target, no starvation, counts that follow the load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.pipeline import (
    REVIEW_CALLS,
    Load,
    Machine,
    MeasuredCount,
    make_count_rule,
    most_micro_batches,
    spin_count,
)
from tests.cluster.pipelined import TWO_CORES, PipelineWorld
from tests.examples import examples

# A device where a forward costs the same whatever it holds: splitting never pays there.
FIXED_ONLY = CostProfile(
    target=LinearCost(delta=10e-3), drafters={"general": LinearCost(delta=0.3e-3)}, overhead_s=2e-4
)
# One where it costs its requests and their rows alone: splitting costs nothing.
ROWS_ONLY = CostProfile(
    target=LinearCost(gamma=0.02e-3, rho=0.5e-3),
    drafters={"general": LinearCost(gamma=0.05e-3)},
    overhead_s=2e-4,
)


def load(num_requests: int, rate: float = 0.7, drafter: str = "general") -> Load:
    return Load({drafter: (num_requests, 150 * num_requests)}, rate if drafter else 0.0)


# The prediction


@examples()
@given(
    num_requests=st.integers(1, 64),
    count=st.integers(1, 8),
    depth=st.integers(1, 8),
    cores=st.integers(1, 4),
    rate=st.floats(0.0, 1.0),
)
def test_a_round_is_no_shorter_than_what_the_busiest_part_must_do(
    num_requests: int, count: int, depth: int, cores: int, rate: float
) -> None:
    cost = CostModel(TWO_CORES)
    machine = Machine(cost, cores)
    prediction = machine.predict(load(num_requests, rate), count, depth)
    rows = num_requests * (1 + depth)
    assert prediction.seconds >= cost.verify_seconds(num_requests, rows, 150 * num_requests, drafted=True) * (
        1 - 1e-9
    )
    assert prediction.idle_s >= -1e-12
    assert num_requests <= prediction.tokens <= rows + 1e-9


def test_nothing_is_split_where_nothing_is_drafted() -> None:
    machine = Machine(CostModel(TWO_CORES))
    assert spin_count(machine, load(32, drafter="")) == 1
    assert machine.best(load(32, drafter=""), 1).depth == 0


@pytest.mark.parametrize("num_requests", [1, 4, 5, 8, 16, 64])
def test_micro_batches_have_several_requests(num_requests: int) -> None:
    most = most_micro_batches(num_requests)
    assert most == 1 or num_requests // most >= 2
    assert (most == 1) == (num_requests <= 4)


def test_spins_heuristic_splits_where_it_costs_nothing_and_not_where_it_costs_all() -> None:
    assert spin_count(Machine(CostModel(FIXED_ONLY)), load(16)) == 1
    assert spin_count(Machine(CostModel(ROWS_ONLY)), load(16)) >= 2


@examples()
@given(num_requests=st.integers(5, 64), rate=st.floats(0.1, 0.95))
def test_spins_heuristic_is_near_the_best_count_it_may_choose(num_requests: int, rate: float) -> None:
    machine = Machine(CostModel(TWO_CORES))
    chosen = spin_count(machine, load(num_requests, rate))
    best = max(
        machine.best(load(num_requests, rate), count).goodput
        for count in range(1, most_micro_batches(num_requests) + 1)
    )
    assert machine.best(load(num_requests, rate), chosen).goodput >= 0.95 * best


# Choosing by measurement


def review(rule: MeasuredCount, num_requests: int, factor: dict[int, float], cost: CostModel) -> None:
    """A window in which every count runs at `factor` of what is predicted for it."""
    predicted = Machine(cost, 1).best(load(num_requests), rule.count).goodput
    goodput = factor.get(rule.count, 1.0) * predicted
    for _ in range(REVIEW_CALLS):
        rule.measured(1.0, round(goodput), num_requests)
    rule.review(load(num_requests), cost)


def test_a_split_that_does_not_pay_is_taken_back_and_stays_so() -> None:
    cost, rule = CostModel(ROWS_ONLY), MeasuredCount(1, 8)
    counts = []
    for _ in range(30):
        review(rule, 16, dict.fromkeys(range(2, 9), 0.5), cost)
        counts.append(rule.count)
    assert max(counts) > 1, "it was predicted to pay"
    assert counts[-1] == 1
    assert sum(count > 1 for count in counts) <= 9


def test_a_small_difference_changes_nothing() -> None:
    cost, rule = CostModel(ROWS_ONLY), MeasuredCount(1, 8)
    for _ in range(5):
        review(rule, 16, {}, cost)
    settled = rule.count
    for _ in range(20):
        review(rule, 16, {settled: 0.98}, cost)
        assert rule.count == settled


def test_few_requests_share_one_at_once() -> None:
    cost, rule = CostModel(ROWS_ONLY), MeasuredCount(1, 8)
    for _ in range(3):
        review(rule, 16, {}, cost)
    assert rule.count > 1
    rule.measured(0.01, 5, 3)
    assert rule.is_due
    rule.review(load(3), cost)
    assert rule.count == 1


def test_a_review_with_nobody_decoding_changes_nothing() -> None:
    rule = MeasuredCount(1, 8)
    for _ in range(2):
        for _ in range(REVIEW_CALLS):
            rule.measured(0.01, 1, 3)
        rule.review(Load({}, 0.0), CostModel(TWO_CORES))
    assert rule.count == 1


def test_settings_have_their_rules() -> None:
    assert make_count_rule(3, 1, 8).count == 3
    assert not make_count_rule(3, 1, 8).is_due
    assert make_count_rule("spin", 0, 8).count == make_count_rule("auto", 0, 8).count == 1


# The core with simulated workers


def served(num_requests: int = 16, tokens: int = 60, **settings: object) -> PipelineWorld:
    world = PipelineWorld(**settings)  # type: ignore[arg-type]
    for number in range(num_requests):
        world.submit(number, tokens=tokens)
    world.run()
    return world


def test_two_micro_batches_overlap_drafting_and_verification() -> None:
    fixed = {"policy": {"name": "fixed"}}
    apart = served(scheduler={"micro_batches": 1}, **fixed)
    overlapping = served(scheduler={"micro_batches": 2}, **fixed)
    assert overlapping.overlap_s() > 3 * apart.overlap_s()
    assert overlapping.overlap_s() > 0.2 * overlapping.now


def test_the_target_does_not_wait_for_messages_between_micro_batches() -> None:
    world = served(scheduler={"micro_batches": 3}, policy={"name": "fixed"}, tokens=80)
    verifies = [one for one in world.of("target") if len(one.requests) >= 1]
    middle = verifies[len(verifies) // 4 : -len(verifies) // 4]
    busy = sum(one.end - one.start for one in middle)
    assert busy > 0.93 * (middle[-1].end - middle[0].start)


def test_requests_that_draft_nothing_are_verified_together() -> None:
    world = served(scheduler={"micro_batches": 4}, policy={"name": "autoregressive"})
    decodes = [len(one.requests) for one in world.of("target")]
    assert sum(decodes) / len(decodes) > 10


@pytest.mark.parametrize("setting", [2, "auto"])
def test_a_slow_drafter_does_not_stall_the_others(setting: int | str) -> None:
    """Half of the requests insist on a drafter ten times as slow; each drafter has a core of its own."""
    times = {}
    for slow in (1.0, 20.0):
        world = PipelineWorld(
            {"micro_batches": setting}, {"name": "fixed"}, speed={"general": slow}, num_cores=4
        )
        for number in range(16):
            world.submit(number, tokens=60, drafter="general" if number < 4 else "code")
        world.run()
        quick = {f"r{number}" for number in range(4, 16)}
        times[slow] = max(one.end for one in world.of("target") if quick & set(one.requests))
    if setting == "auto":
        assert times[20.0] < 1.1 * times[1.0]
    else:
        assert times[20.0] > 1.1 * times[1.0], "as in the paper, its micro-batch waits"


def test_nobody_starves() -> None:
    world = served(num_requests=24, scheduler={"micro_batches": 4}, policy={"name": "fixed"})
    verifies = world.of("target")
    last: dict[str, float] = {}
    gaps = []
    for one in verifies:
        for request_id in one.requests:
            gaps.append(one.end - last.get(request_id, one.end))
            last[request_id] = one.end
    longest = max(one.end - one.start for one in verifies)
    assert max(gaps) < 4 * 4 * longest


@pytest.mark.parametrize("setting", ["spin", "auto"])
def test_the_count_follows_the_load(setting: str) -> None:
    world = PipelineWorld({"micro_batches": setting}, {"name": "fixed"}, profile=ROWS_ONLY)
    world.submit(0, tokens=150)
    for number in range(1, 24):
        world.submit(number, at=0.15, tokens=60)
    world.run()
    counts = [count for _, count in world.counts]
    assert counts[0] == 1
    assert max(counts) > 1
    assert counts[-1] == 1, "the last one is alone again"
    assert all(at > 0.15 for at, count in world.counts if count > 1)


@examples(40)
@given(
    seed=st.integers(0, 2**16),
    setting=st.sampled_from([1, 2, 3, 5, "spin", "auto"]),
    policy=st.sampled_from(["flotilla", "fixed", "adaserve", "autoregressive"]),
    profile=st.sampled_from([TWO_CORES, ROWS_ONLY, FIXED_ONLY]),
    cores=st.integers(1, 3),
    data=st.data(),
)
def test_whatever_the_count_no_request_is_lost(
    seed: int,
    setting: int | str,
    policy: str,
    profile: CostProfile,
    cores: int,
    data: st.DataObject,
) -> None:
    """Texts are right, and no complete micro-batch waits for an idle target: `run` checks both."""
    speeds = {name: data.draw(st.sampled_from([0.2, 1.0, 15.0])) for name in profile.drafters}
    world = PipelineWorld(
        {"micro_batches": setting}, {"name": policy}, profile, speed=speeds, num_cores=cores, seed=seed
    )
    for number in range(data.draw(st.integers(1, 20))):
        at = data.draw(st.floats(0.0, 0.2))
        world.submit(number, at=at, tokens=data.draw(st.integers(1, 30)))
    # The number of micro-batches jumps about as no rule would let it.
    jumps = data.draw(st.lists(st.integers(1, 8), max_size=30))
    handle = world.core.handle

    def jumping(event, now):  # type: ignore[no-untyped-def]
        if jumps and seed % 2:
            world.core.micro_batches.rule.count = jumps.pop()
        return handle(event, now)

    world.core.handle = jumping  # type: ignore[method-assign]
    world.run()
