"""Figures, differences and files of a comparison, against examples worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import compare, compare_outputs, compare_summary, demo, plots
from benchmarks.compare_cell import StepTotals
from benchmarks.compare_plan import Rate, Run
from benchmarks.compare_record import Record, run_record
from benchmarks.compare_statistics import Interval, against_best, by_policy, figures, mean_of, ratio_of
from benchmarks.load_client import LoadResult, Outcome
from benchmarks.objectives import Slo
from benchmarks.paired_times import paired_times
from benchmarks.prompts import Prompt
from benchmarks.workload import BenchRequest
from zoo.registry import TARGET

NOTHING = StepTotals(0, 0, 0, 0, 0, 0, 0)
STEPS = StepTotals(100, 2.0, 0.5, 1.2, 0.1, 0, 0)
POINT = "rate=2"


def outcome(tokens: list[int], tpot_ms: float, number: int = 0, domain: str = "code") -> Outcome:
    """One that took 10 ms to the first token and `tpot_ms` to each further one; 10 ms are the objective."""
    request = BenchRequest(number, Prompt(domain, token_ids=(number, 1)), 64, slo=Slo(tpot_ms=10.0))
    return Outcome(
        request,
        ttft_ms=10.0,
        e2e_ms=10.0 + tpot_ms * (len(tokens) - 1),
        token_ids=tokens,
        num_output_tokens=len(tokens),
        metrics={"speculative_decoding": {"num_spec_steps": 10, "num_accepted_draft_tokens": 15}},
    )


def run_of(policy: str, seed: int, tpots: list[float], failed: int = 0) -> dict[str, Any]:
    outcomes = [
        outcome(list(range(11)), tpot, n, "code" if n % 2 else "chat") for n, tpot in enumerate(tpots)
    ]
    for one in outcomes[:failed]:
        one.error = "queue_full: too many"
    return run_record(Run(policy, POINT, seed), LoadResult(outcomes, 2.0, 0.1), NOTHING, STEPS, [])


def record_of(runs: list[dict[str, Any]], path: Path | None = None) -> Record:
    record = Record({"mix": None}, {}, path, baseline={"code": {"tpot_ms": 5.0}}, saturation=4.0, runs=runs)
    record.points[POINT] = {"requests_per_s": 2.0, "rate": {"value": 2.0, "relative": False}}
    return record


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=6))
def test_an_interval_holds_its_mean_and_stays_within_what_was_measured(values: list[float]) -> None:
    interval = mean_of(values)
    assert interval.mean == pytest.approx(sum(values) / len(values))
    if len(values) > 1:
        assert interval.low is not None
        assert interval.high is not None
        assert min(values) - 1e-9 <= interval.low <= interval.mean + 1e-9
        assert interval.mean - 1e-9 <= interval.high <= max(values) + 1e-9


def test_seeds_without_a_value_are_left_out() -> None:
    assert mean_of([None, 2.0, None]).mean == 2.0
    assert mean_of([None]).mean is None


def test_a_ratio_is_of_means_and_not_a_mean_of_ratios() -> None:
    """With one seed 1 against 10, with the other 100 against 100: nobody is 5.5 times as good."""
    found = ratio_of([(10.0, 1.0), (100.0, 100.0)])
    assert found.mean == pytest.approx(110 / 101)
    assert (found.low, found.high) == (1.0, 10.0)
    assert ratio_of([(2.0, 1.0)]) == Interval(2.0)
    assert ratio_of([]) == ratio_of([(1.0, 0.0), (2.0, 0.0)]) == Interval(None)
    # A quarter of the resamples has nothing in the denominator.
    assert ratio_of([(1.0, 0.0), (4.0, 2.0)]) == Interval(2.5)


def test_figures_of_a_policy_over_seeds() -> None:
    """Of four requests one is too slow with the first seed, one fails with the second."""
    runs = [run_of("adaserve", 0, [5.0, 8.0, 9.0, 20.0]), run_of("adaserve", 1, [5.0] * 4, failed=1)]
    found = figures("adaserve", runs)
    assert (found.num_seeds, found.num_requests, found.num_errors) == (2, 8, 1)
    assert found.attainment.mean == pytest.approx(0.75)
    assert found.by_class["code"].mean == pytest.approx(0.75)
    assert found.goodput_requests_per_s.mean == pytest.approx(1.5)
    assert found.goodput_tokens_per_s.mean == pytest.approx(33 / 2.0)
    assert found.accepted_per_step.mean == pytest.approx(1.5)
    assert found.step_ms.mean == pytest.approx(20.0)
    assert found.draft_ms.mean == pytest.approx(5.0)
    assert found.verify_ms.mean == pytest.approx(12.0)
    assert found.other_ms.mean == pytest.approx(3.0)
    assert found.scheduler_ms.mean == pytest.approx(1.0)


def test_violations_are_compared_with_the_best_of_the_others() -> None:
    runs = [
        run_of("flotilla", 0, [5.0, 5.0, 5.0, 20.0]),
        run_of("flotilla", 1, [5.0, 5.0, 5.0, 5.0]),
        run_of("adaserve", 0, [5.0, 20.0, 20.0, 20.0]),
        run_of("adaserve", 1, [5.0, 5.0, 5.0, 5.0]),
        run_of("autoregressive", 0, [20.0] * 4),
        run_of("autoregressive", 1, [20.0, 20.0, 5.0, 5.0]),
    ]
    held = by_policy(runs, POINT)
    found = against_best("flotilla", held, ["autoregressive", "adaserve"], "autoregressive")
    assert found is not None
    assert (found.baseline, found.violations, found.baseline_violations) == ("adaserve", 1, 3)
    assert found.violations_ratio == pytest.approx(3.0)
    assert found.attainment_gain.mean == pytest.approx(0.25)
    # Of means over seeds: 7 requests against 5, and against 2, though plain decoding has none with the first.
    assert found.goodput_ratio.mean == pytest.approx(7 / 5)
    assert found.goodput_over_plain.mean == pytest.approx(7 / 2)
    assert against_best("flotilla", held, [], "autoregressive") is None
    held["flotilla"][0] = held["flotilla"][1]
    found = against_best("flotilla", held, ["adaserve"], "autoregressive")
    assert found is not None
    assert found.violations_ratio == math.inf
    held["adaserve"][0] = held["adaserve"][1]
    found = against_best("flotilla", held, ["adaserve"], "autoregressive")
    assert found is not None
    assert found.violations_ratio is None


def test_a_request_without_objectives_that_fails_violates_none() -> None:
    def run(policy: str, failed: int) -> dict[str, Any]:
        outcomes = [outcome([1, 2, 3], 5.0 if n else 20.0, n) for n in range(4)]
        for one in outcomes[1:]:
            one.request = replace(one.request, slo=Slo())
        for one in outcomes[1 : 1 + failed]:
            one.error = "queue_full: too many"
        return run_record(Run(policy, POINT, 0), LoadResult(outcomes, 2.0, 0.1), NOTHING, STEPS, [])

    held = by_policy([run("flotilla", 2), run("adaserve", 0)], POINT)
    found = against_best("flotilla", held, ["adaserve"], "autoregressive")
    assert found is not None
    assert found.attainment_gain.mean == 0.0
    assert (found.violations, found.baseline_violations, found.violations_ratio) == (1, 1, 1.0)


def test_outputs_that_differ_from_the_first_are_found() -> None:
    outputs: dict[str, str] = {}
    first = [outcome([1, 2, 3], 5.0, 0), outcome([4, 5], 5.0, 1)]
    assert compare_outputs.check(outputs, first) == []
    failed = outcome([9], 5.0, 1)
    failed.error = "lost"
    assert compare_outputs.check(outputs, [outcome([1, 2, 3], 9.0, 0), failed]) == []
    (differing,) = compare_outputs.check(outputs, [outcome([1, 2, 4], 5.0, 0)])
    assert differing.expected == [1, 2, 3]
    longer = outcome([7, 7], 5.0, 0)
    longer.request = replace(longer.request, max_tokens=65)
    assert compare_outputs.check(outputs, [longer]) == [], "another bound is another question"


def test_differences_count_as_unproven_until_they_are_explained() -> None:
    run = run_of("flotilla", 0, [5.0] * 4)
    outputs = {compare_outputs.key_of(outcome([1], 5.0).request): "2"}
    # The first output of a prompt is what others are compared with, and compared with nothing itself.
    assert compare_outputs.count([run], outputs) == (3, 0, 0)
    differing = compare_outputs.check(outputs, [outcome([1], 5.0)])
    run["differences"] = compare_outputs.unexplained(differing)
    assert compare_outputs.count([run], outputs) == (3, 1, 1)
    run["differences"][0]["proven"] = True
    assert compare_outputs.count([run], outputs) == (3, 1, 0)


@pytest.mark.thorough
def test_differences_of_an_interrupted_comparison_are_explained_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to run, and nothing is started for it."""
    options = compare.CompareOptions(
        ("flotilla",), rates=(Rate(2.0),), seeds=(0,), json_file=tmp_path / "c.json"
    )
    comparison = compare.Comparison(options)
    record = comparison.record
    run = run_of("flotilla", 0, [5.0] * 4)
    compare_outputs.check(record.outputs, [outcome([2, 3], 5.0, 7)])
    run["differences"] = compare_outputs.unexplained(
        compare_outputs.check(record.outputs, [outcome([2, 4], 5.0, 7)])
    )
    record.runs.append(run)
    record.save()

    def explained(differing: list[compare_outputs.Differing], *rest: Any) -> list[dict[str, Any]]:
        (one,) = differing
        assert (one.expected, one.outcome.token_ids) == ([2, 3], [2, 4])
        assert one.outcome.request == replace(outcome([], 5.0, 7).request, slo=Slo())
        return [{"prompt": 7, "proven": True}]

    monkeypatch.setattr(compare_outputs, "explain_all", explained)
    again = compare.Comparison(options)
    assert again.pending == []
    again.measure()
    held = json.loads((tmp_path / "c.json").read_text())
    assert compare_outputs.count(held["runs"], held["outputs"]) == (3, 1, 0)
    monkeypatch.setattr(compare_outputs, "explain_all", lambda *given: pytest.fail("they were explained"))
    compare.Comparison(options).measure()


@pytest.mark.thorough
def test_a_workload_file_whose_contents_changed_is_another_workload(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    options = compare.CompareOptions(
        ("flotilla",), source=str(prompts), rates=(Rate(2.0),), seeds=(0,), json_file=tmp_path / "c.json"
    )
    prompts.write_text(json.dumps({"domain": "code", "prompt": "def first():"}))
    compare.Comparison(options).record.save()
    compare.Comparison(options)
    prompts.write_text(json.dumps({"domain": "code", "prompt": "def other():"}))
    with pytest.raises(ValueError, match="runs with another prompts"):
        compare.Comparison(options)


def test_a_difference_is_judged_by_the_target_as_it_is_rounded() -> None:
    """Which is another model, with other scores at the place where outputs part."""
    differing = [compare_outputs.Differing(outcome([11, 12], 5.0), [10, 12])]
    gaps = []
    for quantization in (None, "fp8"):
        directory = demo.directory(f"zoo:{TARGET}")
        (found,) = compare_outputs.explain_all(differing, directory, 0.0, (2,), quantization)
        assert (found["expected"], found["found"], found["proven"]) == (10, 11, False)
        gaps.append(found["gap"])
    assert 1e-4 < abs(gaps[0] - gaps[1]) < 3.0


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    settings = {"mix": "code=60", "slos": ("code:1.2x",), "source": "zoo"}
    record = Record.resume(path, settings, {"cpus": 2})
    record.saturation, record.baseline = 4.5, {"code": {"tpot_ms": 5.0}}
    record.runs.append(run_of("flotilla", 0, [5.0, 6.0]))
    record.outputs["prompt"] = "1 2 3"
    record.save()
    with pytest.raises(ValueError, match="of another machine"):
        Record.resume(path, settings, {"cpus": 64})
    again = Record.resume(path, settings, {"cpus": 2, "time": "later"})
    assert again.has(Run("flotilla", POINT, 0))
    assert not again.has(Run("flotilla", POINT, 1))
    assert (again.saturation, again.outputs, again.environment) == (4.5, {"prompt": "1 2 3"}, {"cpus": 2})
    with pytest.raises(ValueError, match="another mix"):
        Record.resume(path, {**settings, "mix": "code=10"}, {})
    path.write_text(json.dumps({"benchmark": "serve"}))
    with pytest.raises(ValueError, match="holds no runs"):
        Record.resume(path, settings, {})
    path.write_text('{"benchmark": "compare", "version": 1, "settings": {}, "runs": []}')
    with pytest.raises(ValueError, match="holds no runs"):
        Record.resume(path, settings, {})


def test_only_failures_keep_the_curve_of_times_per_token_below_all_requests() -> None:
    run = run_of("flotilla", 0, [5.0, 6.0, 7.0, 8.0])
    run["requests"]["domain"] = ["code"] * 4
    run["requests"]["tpot_ms"][0] = None  # an answer of one token
    record = record_of([run])
    for error, highest in (("", 100.0), ("lost", 75.0)):
        run["requests"]["error"][0] = error
        (point,) = compare_summary.summarise(record, ["flotilla"], [POINT], [])
        (axes,) = plots.tpot_distributions(record, point).axes
        assert max(axes.lines[0].get_ydata()) == pytest.approx(highest)


@pytest.mark.thorough
def test_tables_and_plots_of_a_sweep_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ("autoregressive", "adaserve", "flotilla")
    runs = [
        run_of(p, s, [5.0, 8.0, 20.0 - place * 6, 9.0]) for place, p in enumerate(policies) for s in (0, 1)
    ]
    faster = json.loads(json.dumps(runs))
    for run in faster:
        run["run"]["point"] = "rate=4"
    record = record_of(runs + faster)
    record.points["rate=4"] = {**record.points[POINT], "requests_per_s": 4.0}
    summary = compare_summary.summarise(record, policies, [POINT, "rate=4"], ["flotilla"])
    compare_summary.show(record, summary)
    assert plots.axis_of(record, summary) == ("requests per second", [2.0, 4.0])
    drawn = plots.draw(record, summary, tmp_path / "plots")
    assert {path.name for path in drawn} == {
        "attainment.png",
        "goodput.png",
        "steps.png",
        "tpot-rate2.png",
        "tpot-rate4.png",
    }
    assert all(path.stat().st_size > 5000 for path in drawn)
    assert json.dumps(compare_summary.to_json(summary))


def test_times_of_the_same_requests_are_paired_whatever_their_order() -> None:
    """Twice, three times and half as slow; one that failed with the other policy is left out."""
    plain, other = (
        run_of("autoregressive", 0, [4.0, 6.0, 10.0, 5.0]),
        run_of("flotilla", 0, [8.0, 18.0, 5.0, 1.0]),
    )
    plain["requests"]["arrival_s"] = other["requests"]["arrival_s"] = [0.5, 1.0, 1.0, 2.0]
    plain["requests"]["domain"] = other["requests"]["domain"] = ["chat", "code", "code", "chat"]
    plain["requests"]["error"][3] = "queue_full: too many"
    other["requests"] = {
        name: [column[place] for place in (3, 1, 2, 0)] for name, column in other["requests"].items()
    }
    found = paired_times(
        "flotilla", "autoregressive", {"autoregressive": {0: plain}, "flotilla": {0: other, 1: plain}}
    )
    assert found.num_pairs == 3
    assert found.tpot.mean == pytest.approx((2.0 * 3.0 * 0.5) ** (1 / 3))
    assert (found.tpot.low, found.tpot.high) == (None, None)  # of one seed
    assert found.ttft.mean == pytest.approx(1.0)
    # 10 ms to the first of 11 tokens.
    assert found.latency.mean == pytest.approx((90 / 50 * 190 / 70 * 60 / 110) ** (1 / 3))


def test_requests_of_a_seed_are_drawn_together() -> None:
    """The machine was slower for one policy in one seed, and for the other in the other: that proves nothing.

    Requests drawn one by one would have shown an interval of [1.28, 1.55].
    """
    runs = {
        "autoregressive": {seed: run_of("autoregressive", seed, [4.0] * 100) for seed in (0, 1)},
        "flotilla": {0: run_of("flotilla", 0, [4.0] * 100), 1: run_of("flotilla", 1, [8.0] * 100)},
    }
    found = paired_times("flotilla", "autoregressive", runs).tpot
    assert (found.mean, found.low, found.high) == pytest.approx((math.sqrt(2.0), 1.0, 2.0))


def test_without_a_pair_there_is_no_ratio() -> None:
    runs = {
        "autoregressive": {0: run_of("autoregressive", 0, [4.0])},
        "flotilla": {1: run_of("flotilla", 1, [4.0])},
    }
    found = paired_times("flotilla", "autoregressive", runs)
    assert (found.num_pairs, found.tpot.mean) == (0, None)
