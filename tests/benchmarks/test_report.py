"""Report arithmetic against examples worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.load_client import LoadResult
from benchmarks.objectives import Slo
from benchmarks.receipts import summarise_receipts
from benchmarks.report import Distribution, outcome_json, report, summarise
from benchmarks.serve import baseline_latency
from benchmarks.tables import print_run, write_json
from cluster.stream_messages import Objective, Receipt
from deployments.receipts import ChoiceOutcome, metrics
from tests.benchmarks.conftest import MakeOutcome


def test_tpot_is_over_tokens_after_the_first(make_outcome: MakeOutcome) -> None:
    assert make_outcome(ttft_ms=100.0, e2e_ms=400.0, num_output_tokens=4).tpot_ms == pytest.approx(100.0)
    assert make_outcome(ttft_ms=100.0, e2e_ms=100.0, num_output_tokens=1).tpot_ms is None


def test_percentiles() -> None:
    spread = Distribution.of([10.0, 20.0, 30.0, 40.0])
    assert (spread.mean, spread.p50) == (25.0, 25.0)
    assert spread.p90 == pytest.approx(37.0)
    assert Distribution.of([]).p99 is None


def test_both_goodputs_and_attainment(make_outcome: MakeOutcome) -> None:
    """Four requests in 2 s: one meets all, one misses only TTFT, one misses TPOT, one failed."""
    slo = Slo(ttft_ms=50.0, tpot_ms=10.0)
    outcomes = [
        make_outcome(slo=slo, ttft_ms=40.0, e2e_ms=140.0, num_output_tokens=11),
        make_outcome(slo=slo, ttft_ms=60.0, e2e_ms=160.0, num_output_tokens=21),
        make_outcome(slo=slo, ttft_ms=40.0, e2e_ms=300.0, num_output_tokens=11),
        make_outcome(slo=slo, error="HTTP 503: no"),
    ]
    figures = summarise("code", outcomes, 2.0)
    assert figures.num_errors == 1
    assert figures.requests_per_s == pytest.approx(1.5)
    assert figures.tokens_per_s == pytest.approx(43 / 2)
    assert figures.attainment == pytest.approx(1 / 4)
    assert figures.attainment_tpot == pytest.approx(2 / 4)
    assert figures.goodput_requests_per_s == pytest.approx(1 / 2)
    assert figures.goodput_tokens_per_s == pytest.approx((11 + 21) / 2)


def test_limits_are_inclusive_and_absent_ones_are_met(make_outcome: MakeOutcome) -> None:
    outcome = make_outcome(slo=Slo(tpot_ms=10.0), ttft_ms=5.0, e2e_ms=105.0, num_output_tokens=11)
    assert summarise("code", [outcome], 1.0).attainment == 1.0
    single = make_outcome(slo=Slo(tpot_ms=1.0), ttft_ms=5.0, e2e_ms=5.0, num_output_tokens=1)
    assert summarise("code", [single], 1.0).attainment == 1.0
    free = summarise("code", [make_outcome(ttft_ms=5.0, e2e_ms=9.0, num_output_tokens=3)], 1.0)
    assert free.attainment is None
    assert free.goodput_tokens_per_s == free.tokens_per_s == 3.0


def test_report_by_class(make_outcome: MakeOutcome) -> None:
    outcomes = [
        make_outcome("code", ttft_ms=1.0, e2e_ms=3.0, num_output_tokens=3, lag_ms=2.0),
        make_outcome("chat", ttft_ms=3.0, e2e_ms=5.0, num_output_tokens=2),
        make_outcome("chat", error="the stream ended early"),
    ]
    run = report(LoadResult(outcomes, duration_s=0.5, client_cpu_share=0.1))
    assert [part.domain for part in run.by_class] == ["chat", "code"]
    assert run.total.num_output_tokens == 5
    assert run.total.tokens_per_s == pytest.approx(10.0)
    assert run.errors == {"the stream ended early": 1}
    assert run.send_lag_ms_p99 == pytest.approx(1.96)
    json.dumps([run.to_json(), *map(outcome_json, outcomes)], allow_nan=False)


def test_receipts_are_weighted_by_steps() -> None:
    def metrics(steps: int, drafted: int, accepted: int, drafters: object) -> dict[str, object]:
        return {
            "speculative_decoding": {
                "num_spec_steps": steps,
                "num_draft_tokens": drafted,
                "num_accepted_draft_tokens": accepted,
                "mean_acceptance_length": 1 + accepted / steps,
                "drafters": drafters,
            }
        }

    total = summarise_receipts(
        [metrics(10, 40, 30, {"code": 25, "chat": 5}), metrics(30, 60, 10, {"chat": 10}), {}]
    )
    assert total is not None
    assert total.num_receipts == 2
    assert total.mean_acceptance_length == pytest.approx(80 / 40)
    assert total.acceptance_rate == pytest.approx(0.4)
    assert total.drafters == {"code": 25, "chat": 15}
    assert summarise_receipts([{}]) is None


def test_the_mean_acceptance_length_is_what_servers_say() -> None:
    """6 tokens in 2 steps: 3 accepted and the target's own, then 2 accepted of which one ends the answer."""
    receipt = Receipt(
        queue_ms=0.0,
        ttft_ms=1.0,
        tpot_ms=1.0,
        e2e_ms=6.0,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=6,
        num_steps=2,
        num_drafted=8,
        num_verified=8,
        num_accepted=5,
        drafters={"code": 5},
        num_preemptions=0,
    )
    outcome = ChoiceOutcome(3, 6, receipt, 1.0, 6.0, 1.0)
    told = metrics([outcome], Objective(), 0)
    assert told["speculative_decoding"]["mean_acceptance_length"] == 3.0
    total = summarise_receipts([told, told])
    assert total is not None
    assert total.mean_acceptance_length == 3.0


def test_result_files_are_strict_json(tmp_path: Path) -> None:
    write_json(
        tmp_path / "out.json", {"gap": float("inf"), "parts": [(1.5, float("nan"))], "where": tmp_path}
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == {"gap": None, "parts": [[1.5, None]], "where": str(tmp_path)}


def test_baseline_pools_tpot_and_keeps_ttft_apart(make_outcome: MakeOutcome) -> None:
    outcomes = [
        make_outcome("code", error="HTTP 400: too long"),
        make_outcome("code", ttft_ms=10.0, e2e_ms=30.0, num_output_tokens=3),
        make_outcome("code", ttft_ms=20.0, e2e_ms=60.0, num_output_tokens=3),
        make_outcome("chat", ttft_ms=5.0, e2e_ms=35.0, num_output_tokens=2),
    ]
    baselines = baseline_latency(outcomes)
    assert baselines["code"] == Slo(ttft_ms=15.0, tpot_ms=20.0, e2e_ms=45.0)
    assert baselines["chat"] == Slo(ttft_ms=5.0, tpot_ms=20.0, e2e_ms=35.0)
    with pytest.raises(RuntimeError, match="down"):
        baseline_latency([make_outcome(error="down")])


def test_brackets_of_servers_and_classes_are_text(
    make_outcome: MakeOutcome, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of pydantic's messages, which vLLM hands on; read as markup they vanish, or end the command."""
    errors = ["HTTP 400: no [/v1/models] closes", "HTTP 400: wrong [type=missing, input_value={}]"]
    outcomes = [make_outcome(domain="qa[en]", error=error, slo=Slo(tpot_ms=1.0)) for error in errors]
    print_run(report(LoadResult(outcomes, 1.0, 0.1)), {"qa[en]": "TPOT 1.0 ms"})
    shown = capsys.readouterr().out
    assert all(f"1 x {error}" in shown for error in errors)
    assert shown.count("qa[en]") == 2
