"""What a comparison runs: policies as given, every combination once, and the same requests for everybody."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.arrivals import category_peaks
from benchmarks.compare import CompareOptions, traffic_of
from benchmarks.compare_plan import Point, Rate, Run, parse_entrant, parse_rate, points_of, schedule
from benchmarks.compare_workload import (
    Traffic,
    requests_for,
    those_that_fit,
    warmup_requests,
    with_urgent_share,
)
from benchmarks.objectives import Limit, Slo, SloSpec, parse_slos
from benchmarks.prompts import Prompt
from deployments.demo import demo_config

CLASSES = ("chat", "code", "summary")
BASELINES = {name: Slo(tpot_ms=10.0) for name in CLASSES}


def traffic(**changes: Any) -> Traffic:
    prompts = [Prompt(name, token_ids=(index, 1, 2)) for index, name in enumerate(CLASSES * 30)]
    whole = Traffic(
        prompts=prompts,
        shares={"code": 0.6, "chat": 0.2, "summary": 0.2},
        slos=parse_slos(["code:1.2x", "chat:1.5x", "summary:tpot=150"]),
        urgent="code",
        start_s=0.0,
        duration_s=10.0,
        num_requests=None,
        max_tokens=64,
        peaks=False,
    )
    return replace(whole, **changes)


def test_a_policy_is_given_with_its_settings() -> None:
    config = demo_config()
    assert parse_entrant("fixed", config).policy["fixed_depth"] == config.policy.fixed_depth
    entrant = parse_entrant("specinfer:expansion=[1,2,1],max_depth=3,batching=priority", config)
    assert entrant.policy["name"] == "specinfer"
    assert (entrant.policy["expansion"], entrant.policy["max_depth"]) == ([1, 2, 1], 3)
    assert entrant.scheduler["batching"] == "priority"
    assert not entrant.is_ours
    assert parse_entrant("flotilla:max_depth=2", config).is_ours


def test_our_batching_rule_goes_with_our_policy_alone() -> None:
    rules = {
        text: parse_entrant(text, demo_config()).scheduler["batching"]
        for text in (
            "flotilla",
            "adaserve",
            "autoregressive",
            "adaserve:batching=flotilla",
            "flotilla:batching=fcfs",
        )
    }
    assert list(rules.values()) == ["flotilla", "sarathi", "sarathi", "flotilla", "fcfs"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("speculate-harder", "unknown policy"),
        ("fixed:length=3", "FIELD=VALUE"),
        ("fixed:fixed_depth", "FIELD=VALUE"),
        ("fixed:fixed_depth=many", "fixed_depth"),
        ("fixed:batching=random", "unknown batching rule `random`; known: fcfs"),
    ],
)
def test_a_wrong_policy_says_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as told:
        parse_entrant(text, demo_config())
    assert "pydantic" not in str(told.value)


def test_a_policy_of_ones_own_is_named_by_its_import_path() -> None:
    """As any that is not ours it has plain chunked prefill, unless told otherwise."""
    name = "cluster.policies.fixed.Fixed"
    entrant = parse_entrant(f"{name}:fixed_depth=2", demo_config())
    assert (entrant.policy["name"], entrant.policy["fixed_depth"]) == (name, 2)
    assert entrant.scheduler["batching"] == "sarathi"
    assert parse_entrant(f"{name}:batching=flotilla", demo_config()).scheduler["batching"] == "flotilla"
    with pytest.raises(ValueError, match="cannot be imported"):
        parse_entrant("no_such_module.Policy", demo_config())


def test_rates_are_absolute_or_shares_of_saturation() -> None:
    assert parse_rate("4").resolve(None) == 4.0
    assert parse_rate("0.5x").resolve(12.0) == 6.0
    with pytest.raises(ValueError, match="needs a measured saturation"):
        parse_rate("0.5x").resolve(None)
    for wrong in ("fast", "-1", "0x", "inf"):
        with pytest.raises(ValueError, match="neither"):
            parse_rate(wrong)


def test_every_policy_meets_every_point_and_seed_once_and_orders_differ() -> None:
    policies, points = list("abcdef"), ["slow", "fast", "faster"]
    runs = schedule(policies, points, [0, 1, 2])
    assert Counter(runs) == Counter(Run(p, at, seed) for p in policies for at in points for seed in range(3))
    assert runs == schedule(policies, points, [0, 1, 2])
    # All policies at a point come one right after the other, in another order each time.
    blocks = [runs[start : start + 6] for start in range(0, len(runs), 6)]
    assert all(len({(run.point, run.seed) for run in block}) == 1 for block in blocks)
    assert len({tuple(run.policy for run in block) for block in blocks}) > 6


def test_points_are_all_combinations_with_distinct_names() -> None:
    points = points_of([Rate(2.0), Rate(0.5, True)], [0.1, 0.9], [])
    assert len(points) == 4
    assert points[0] == Point(Rate(2.0), 0.1, None)
    assert len({point.key for point in points}) == 4
    assert [point.key for point in points_of([], [], [])] == ["workload"]


def test_a_seed_gives_the_same_requests_with_the_mix_the_rate_and_the_objectives_asked_for() -> None:
    point = Point(Rate(10.0))
    requests = requests_for(traffic(), point, 10.0, 3, BASELINES)
    assert requests == requests_for(traffic(), point, 10.0, 3, BASELINES)
    assert requests != requests_for(traffic(), point, 10.0, 4, BASELINES)
    assert Counter(request.domain for request in requests) == {"code": 60, "chat": 20, "summary": 20}
    arrivals = [request.arrival_s or 0.0 for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(10.0, rel=0.4)
    tpots = {request.domain: request.slo.tpot_ms for request in requests}
    assert tpots == {"code": pytest.approx(12.0), "chat": pytest.approx(15.0), "summary": 150.0}


def test_saturation_is_measured_with_answers_as_long_as_those_of_the_runs() -> None:
    """AdaServe's files ask for 256 tokens each."""
    long = traffic(prompts=[replace(one, max_tokens=256) for one in traffic().prompts], max_tokens=None)
    runs = requests_for(long, Point(Rate(10.0)), 10.0, 0, BASELINES)
    assert {request.max_tokens for request in runs} == {256}
    assert {request.max_tokens for request in warmup_requests(long, 12, seed=1)} == {256}
    assert {request.max_tokens for request in warmup_requests(traffic(), 12, seed=1)} == {64}


def test_the_slo_scale_and_the_share_of_the_urgent_class_are_swept() -> None:
    point = Point(Rate(10.0), urgent_share=0.9, slo_scale=0.6)
    requests = requests_for(traffic(), point, 10.0, 0, BASELINES)
    assert Counter(request.domain for request in requests) == {"code": 90, "chat": 5, "summary": 5}
    tpots = {request.domain: request.slo.tpot_ms for request in requests}
    assert tpots == {"code": pytest.approx(6.0), "chat": pytest.approx(15.0), "summary": 150.0}
    assert with_urgent_share({"code": 1.0}, "code", 1.0) == {"code": 1.0}


def test_a_workload_with_arrivals_is_sent_as_it_is_up_to_the_duration() -> None:
    slo = SloSpec(tpot=Limit(50.0))
    prompts = [
        Prompt(CLASSES[n % 3], token_ids=(n,), slo=slo, arrival_s=0.5 * n, max_tokens=9) for n in range(60)
    ]
    whole = traffic(prompts=prompts, shares=None, slos={}, max_tokens=None)
    assert whole.has_arrivals
    requests = requests_for(whole, Point(), None, 0, {})
    assert [request.prompt for request in requests] == prompts[:21]
    assert {request.slo.tpot_ms for request in requests} == {50.0}
    faster = requests_for(whole, Point(Rate(4.0)), 4.0, 0, {})
    assert len(faster) == 41
    assert faster[-1].arrival_s == pytest.approx(10.0)
    assert len(requests_for(replace(whole, num_requests=7), Point(), None, 0, {})) == 7
    assert len(requests_for(replace(whole, duration_s=None), Point(), None, 0, {})) == 60
    later = requests_for(replace(whole, start_s=5.0, duration_s=2.0), Point(), None, 0, {})
    assert [request.prompt for request in later] == prompts[10:15]
    assert [request.arrival_s for request in later] == [0.0, 0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("rate", [0.5, 4.0])
def test_a_part_of_a_workload_comes_at_the_rate_asked_for_whatever_its_own(rate: float) -> None:
    """A minute of one request a second, and then two minutes of four; the file is in no order."""
    times = [*map(float, range(60)), *(60.0 + n / 4 for n in range(480))]
    prompts = [Prompt("code", token_ids=(n,), arrival_s=time) for n, time in enumerate(times)]
    whole = traffic(prompts=prompts[::-1], shares=None, slos={}, duration_s=20.0)
    for start_s, first in ((0.0, 0), (60.0, 60)):
        part = requests_for(replace(whole, start_s=start_s), Point(Rate(rate)), rate, 0, {})
        arrivals = [request.arrival_s or 0.0 for request in part]
        # Seconds of the start are the file's own, whatever the rate.
        assert [request.prompt.token_ids for request in part[:2]] == [(first,), (first + 1,)]
        assert (len(part) - 1) / (arrivals[-1] - arrivals[0]) == pytest.approx(rate)
        assert arrivals[-1] == pytest.approx(20.0)
    rare = [*prompts, Prompt("chat", token_ids=(999,), arrival_s=500.0)]  # no part has any of that class
    slos = parse_slos(["chat:tpot=50", "code:tpot=30"])
    short = replace(whole, prompts=rare, slos=slos, duration_s=None, num_requests=31)
    few = requests_for(short, Point(Rate(rate)), rate, 0, {})
    assert {request.slo.tpot_ms for request in few} == {30.0}
    assert few[-1].arrival_s == pytest.approx(30 / rate)


def test_prompts_of_fewer_classes_have_the_objectives_of_those_and_others_must_be_given_some() -> None:
    options = CompareOptions(("flotilla",), source="prompts.jsonl")
    found = traffic_of(options, [Prompt("code", token_ids=(1,)), Prompt("summaries", token_ids=(2,))])
    assert found.slos == parse_slos(["code:1.2x", "summaries:4.5x"])
    with pytest.raises(ValueError, match="no objectives for math; --slo names some"):
        traffic_of(options, [Prompt("code", token_ids=(1,)), Prompt("math", token_ids=(2,))])


def test_classes_peak_one_after_the_other() -> None:
    domains = [name for name in CLASSES for _ in range(2000)]
    times = np.array(category_peaks(domains, 60.0, np.random.default_rng(0)))
    assert ((times >= 0.0) & (times <= 60.0)).all()
    for index, name in enumerate(CLASSES):
        mine = times[[domain == name for domain in domains]]
        counts, _ = np.histogram(mine, bins=3, range=(0.0, 60.0))
        assert counts.argmax() == index
        assert counts[index] > 2 * counts[(index + 1) % 3]
    requests = requests_for(traffic(peaks=True), Point(Rate(10.0)), 10.0, 0, BASELINES)
    arrivals = [request.arrival_s or 0.0 for request in requests]
    assert len(requests) == 100
    assert arrivals == sorted(arrivals)
    assert max(arrivals) <= 10.0


def test_prompts_that_leave_no_room_for_an_answer_are_left_out() -> None:
    prompts = [Prompt("code", token_ids=tuple(range(n))) for n in (3, 4, 5)]
    assert those_that_fit(prompts, 5) == prompts[:2]
