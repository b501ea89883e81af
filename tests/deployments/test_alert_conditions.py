"""What alerts tell apart: refused by one cell or by all, loading or lost, one system or another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.dashboards.alerts import ALERTS
from deployments.dashboards.recording import SloTargets
from deployments.dashboards.rule_files import rule_files
from tests.deployments.promtool_cases import (
    Phases,
    Series,
    counter,
    expect,
    firing,
    gauge,
    judged,
    listed,
    needs_promtool,
    run_promtool,
)

pytestmark = needs_promtool

_FRONT_END = 'job="f", front_end="x"'


def check(tmp_path: Path, series: Series, *expected: dict[str, object]) -> None:
    test = {"input_series": listed(series), "promql_expr_test": list(expected)}
    run_promtool(tmp_path, test, is_about_slo=False)


def looked_at(cell: str, decision: str) -> str:
    return f'flotilla_admission_decisions_total{{job="f", cell="{cell}", tier="chat", decision="{decision}"}}'


def refused_by(cell: str) -> str:
    return f'flotilla_requests_rejected_total{{job="f", cell="{cell}", tier="chat", code="queue_full"}}'


def told(code: str) -> str:
    return f'flotilla_front_end_requests_rejected_total{{{_FRONT_END}, tier="chat", code="{code}"}}'


def ready(cell: str, phases: Phases) -> Series:
    """A cell whose target and only drafter come and go together."""
    values = gauge(phases)
    return {
        f'flotilla_ready{{job="f", cell="{cell}"}}': values,
        f'flotilla_drafters_ready{{job="f", cell="{cell}", drafter="small"}}': values,
    }


OPEN = {f"flotilla_http_requests_open{{{_FRONT_END}}}": gauge([(90, 3)])}


def answered(status: str, phases: Phases, route: str = "/v1/chat/completions") -> Series:
    name = f'flotilla_http_requests_total{{{_FRONT_END}, route="{route}", method="POST", status="{status}"}}'
    return {name: counter(phases)}


def called(code: str, phases: Phases) -> Series:
    name = f'flotilla_grpc_calls_total{{{_FRONT_END}, method="GenerateStream", code="{code}"}}'
    return {name: counter(phases)}


def broke_off(status: str, phases: Phases) -> Series:
    name = f'flotilla_http_streams_failed_total{{{_FRONT_END}, route="/v1/responses", status="{status}"}}'
    return {name: counter(phases)}


def ended(reason: str, phases: Phases) -> Series:
    name = f'flotilla_requests_total{{job="f", cell="a", tier="chat", finish_reason="{reason}"}}'
    return {name: counter(phases)}


# -- costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_calls", "fires"), [(3, 0), (20, 1)])
def test_a_machine_at_rest_is_not_said_to_have_a_wrong_profile(
    tmp_path: Path, num_calls: int, fires: int
) -> None:
    """A few short answers an hour: clocks and caches make their forwards slow, which no profile mends."""
    labels = '{job="f", cell="a", model="target"}'
    series = {
        f"flotilla_cost_model_calls_total{labels}": counter([(60, num_calls)]),
        f"flotilla_cost_model_absolute_error_seconds_total{labels}": counter([(60, 0.08)]),
        f"flotilla_cost_model_actual_seconds_total{labels}": counter([(60, 0.1)]),
    }
    check(tmp_path, series, expect(firing("FlotillaCostModelDrift"), 50, fires))


# -- workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alert", "series", "most"),
    [
        (
            "FlotillaRestartsFlapping",
            'flotilla_worker_restarts_total{job="f", cell="a", worker="small"}',
            3,
        ),
        (
            "FlotillaWorkersStalling",
            'flotilla_worker_stalls_total{job="f", cell="a", kind="target", reason="stuck"}',
            2,
        ),
    ],
)
def test_as_many_losses_as_are_allowed_raise_nothing(
    tmp_path: Path, alert: str, series: str, most: int
) -> None:
    """`increase` extrapolates to the whole window: between two scrapes three of them are 3.2."""
    (rule,) = [one for one in ALERTS if one.name == alert]
    for number, fires in ((most, 0), (most + 1, 1)):
        values = {series: counter([(30, 0), (number, 1), (10, 0)])}
        now = expect(f"count({rule.expr}) or vector(0)", 0, fires) | {"eval_time": "38m30s"}
        check(tmp_path, values, now)


# -- refusals ----------------------------------------------------------------------------------------


def test_what_a_full_cell_refuses_and_another_takes_wakes_nobody(tmp_path: Path) -> None:
    """Half of the requests go to a full cell first, and all are taken."""
    series = {
        refused_by("a"): counter([(60, 50)]),
        looked_at("a", "rejected"): counter([(60, 50)]),
        looked_at("b", "accepted"): counter([(60, 100)]),
        told("queue_full"): counter([(60, 0)]),
    }
    share = {"labels": 'flotilla:queue_refusals:ratio_rate5m{job="f", tier="chat"}', "value": 0}
    recorded = {"expr": "flotilla:queue_refusals:ratio_rate5m", "eval_time": "50m", "exp_samples": [share]}
    check(tmp_path, series, expect(firing(), 50, 0), recorded)


def test_a_request_that_all_cells_refuse_counts_once(tmp_path: Path) -> None:
    """Of a hundred, two are refused by each of four cells, and one for its terms."""
    series = {
        looked_at("a", "accepted"): counter([(60, 970)]),
        told("queue_full"): counter([(60, 20)]),
        told("slo_infeasible"): counter([(60, 10)]),
    }
    for cell in "abcd":
        series |= {refused_by(cell): counter([(60, 20)]), looked_at(cell, "rejected"): counter([(60, 20)])}
    exact = 'round(1000 * flotilla:queue_refusals:ratio_rate5m{tier="chat"})'
    share = {"labels": '{job="f", tier="chat"}', "value": 20}
    recorded = {"expr": exact, "eval_time": "50m", "exp_samples": [share]}
    check(tmp_path, series, expect(firing(), 50, 0), recorded)


def test_a_refusal_now_and_then_wakes_nobody(tmp_path: Path) -> None:
    """One of ten requests in five minutes, as long as it may last."""
    series = {looked_at("a", "accepted"): counter([(60, 1.8)]), told("queue_full"): counter([(60, 0.2)])}
    check(tmp_path, series, expect(firing(), 50, 0))


def test_a_few_requests_that_were_predicted_badly_raise_nothing(tmp_path: Path) -> None:
    """All of one request in five minutes."""
    ratio = 'flotilla_admission_prediction_ratio_{part}{{job="f", cell="a", objective="ttft"{le}}}'
    within, every = ratio.format(part="bucket", le=', le="2.0"'), ratio.format(part="count", le="")
    check(tmp_path, {within: counter([(60, 0)]), every: counter([(60, 0.2)])}, expect(firing(), 50, 0))


# -- cells that load, and cells that are lost ---------------------------------------------------------


def test_a_cell_that_loads_beside_one_that_serves_raises_nothing(tmp_path: Path) -> None:
    """Neither one that takes six minutes nor one that takes half an hour."""
    series = {
        **OPEN,
        **ready("a", [(90, 1)]),
        **ready("b", [(10, None), (6, 0), (74, 1)]),
        **ready("c", [(10, None), (29, 0), (51, 1)]),
    }
    check(tmp_path, series, *(expect(firing(), minute, 0) for minute in (14, 15, 16, 30, 38, 60)))


def test_the_first_installation_pages_nobody(tmp_path: Path) -> None:
    """Front ends are there before the first cell is, and that before its models."""
    series = {**OPEN, **ready("a", [(5, None), (20, 0), (65, 1)])}
    check(tmp_path, series, *(expect(firing(), minute, 0) for minute in (4, 10, 24, 40)))


def test_a_target_made_again_in_each_of_four_cells_is_no_worker_that_keeps_failing(tmp_path: Path) -> None:
    """As when their nodes are drained one after the other: workers of all cells have the same names."""
    name = 'flotilla_worker_restarts_total{{job="f", cell="{}", worker="verifier"}}'
    series = {name.format(cell): counter([(20 + at, 0), (1, 1), (60, 0)]) for at, cell in enumerate("abcd")}
    check(tmp_path, series, *(expect(firing(), minute, 0) for minute in (25, 27, 30)))


def test_a_cell_that_was_ready_is_missed_at_once(tmp_path: Path) -> None:
    """Its target and its drafters, and as it was the only one, the system."""
    series = {**OPEN, **ready("a", [(10, 0), (20, 1), (60, 0)])}
    alerts = ("FlotillaCellDown", "FlotillaNoDraftersReady", "FlotillaNoCellReady")
    check(tmp_path, series, expect(firing(), 29, 0), *(expect(firing(alert), 35, 1) for alert in alerts))


def test_a_cell_that_never_becomes_complete_is_a_ticket_that_counts(tmp_path: Path) -> None:
    series = {**OPEN, **ready("a", [(90, 1)]), **ready("b", [(90, 0)])}
    missing = {
        "exp_labels": {"severity": "ticket", "job": "f", "cell": "b"},
        "exp_annotations": {
            "summary": "Cell b of f does not become complete.",
            "description": "Of its target and its kinds of drafters, 2 are not ready, for 30 minutes.",
            "runbook_url": "https://wiki.example/FlotillaCellIncomplete.md",
        },
    }
    alert = {"eval_time": "40m", "alertname": "FlotillaCellIncomplete", "exp_alerts": [missing]}
    test = {
        "input_series": listed(series),
        "promql_expr_test": [expect(firing(), 29, 0), expect(firing(), 40, 1)],
        "alert_rule_test": [alert],
    }
    run_promtool(tmp_path, test, is_about_slo=False)


# -- requests that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "series",
    [
        answered("500", [(60, 20)]),
        {**answered("200", [(60, 20)]), **answered("503", [(60, 20)])},
        {**answered("200", [(60, 20)]), **called("INTERNAL", [(60, 20)])},
        {**called("OK", [(60, 20)]), **called("UNAVAILABLE", [(60, 20)])},
        {**answered("200", [(60, 20)]), **broke_off("503", [(60, 20)])},
        {**ended("stop", [(60, 20)]), **ended("error", [(60, 20)])},
        # Few clients, of whom nobody gets an answer.
        answered("500", [(60, 0.5)]),
    ],
)
def test_requests_that_fail_by_this_systems_fault_wake_somebody(tmp_path: Path, series: Series) -> None:
    check(tmp_path, series, expect(firing("FlotillaRequestsFailing"), 40, 1), expect(firing(), 40, 1))


@pytest.mark.parametrize(
    "series",
    [
        {**answered("200", [(60, 20)]), **answered("429", [(60, 20)])},
        {**answered("200", [(60, 20)]), **answered("400", [(60, 20)])},
        {**called("OK", [(60, 20)]), **called("RESOURCE_EXHAUSTED", [(60, 20)])},
        {**called("OK", [(60, 20)]), **called("DEADLINE_EXCEEDED", [(60, 20)])},
        {**answered("200", [(60, 20)]), **broke_off("400", [(60, 20)])},
        {**ended("stop", [(60, 20)]), **ended("cancelled", [(60, 20)]), **ended("invalid", [(60, 20)])},
        # Probes of a server that loads.
        {**answered("200", [(60, 20)]), **answered("503", [(60, 20)], "/ready")},
        # Fewer than one in twenty.
        {**answered("200", [(60, 100)]), **answered("500", [(60, 4)])},
        # Nobody else asks, so that the share of the one is large for long.
        answered("500", [(38, 0), (1, 1), (21, 0)]),
        {**ended("error", [(36, 0), (4, 1), (20, 0)])},
    ],
)
def test_what_clients_do_and_single_failures_wake_nobody(tmp_path: Path, series: Series) -> None:
    check(tmp_path, series, *(expect(firing(), minute, 0) for minute in (39, 40, 42, 44, 50)))


# -- several systems in one Prometheus ----------------------------------------------------------------

ONES, OTHERS = "serving/one-flotilla", "serving/other-flotilla"


def both_files() -> dict[str, str]:
    """Rules of two releases with targets of their own, as one Prometheus reads them."""
    files = {}
    for job, targets in {ONES: SloTargets(0.95), OTHERS: SloTargets(0.99)}.items():
        for name, text in rule_files(targets, job=job).items():
            short = job.partition("/")[2]
            files[f"{short}-{name}"] = text.replace("- name: flotilla-", f"- name: {short}-flotilla-")
    return files


def test_each_of_two_systems_has_its_own_target(tmp_path: Path) -> None:
    """A tenth missed is twice what one allows and ten times what the other does."""
    series = {
        name.replace('job="f"', f'job="{job}"'): values
        for job in (ONES, OTHERS)
        for name, values in judged([(45, 0.1)]).items()
    }
    exact = "round(flotilla:slo_burn:ratio_rate1h)"
    burns = ((ONES, 2), (OTHERS, 10))
    samples = [{"labels": f'{{job="{job}", tier="chat"}}', "value": burn} for job, burn in burns]
    expected = {"expr": exact, "eval_time": "80m", "exp_samples": samples}
    test = {"input_series": listed(series), "promql_expr_test": [expected]}
    run_promtool(tmp_path, test, step=2, files=both_files())


def test_a_system_that_is_not_scraped_is_missed_beside_another(tmp_path: Path) -> None:
    def told_by(job: str) -> str:
        return f'flotilla_build_info{{job={json.dumps(job)}, front_end="x", version="1", python="3"}}'

    series = {told_by(ONES): gauge([(10, 1), (30, None)]), told_by(OTHERS): gauge([(40, 1)])}
    missed = {
        "exp_labels": {"severity": "page", "job": ONES},
        "exp_annotations": {
            "summary": f"Prometheus has no metrics of Flotilla ({ONES}).",
            "description": "No front end has been scraped for 5 minutes: it is down, or Prometheus does not "
            "reach it; no other alert can fire.",
            "runbook_url": "docs/runbooks/FlotillaScrapeAbsent.md",
        },
    }
    alert = {"eval_time": "30m", "alertname": "FlotillaScrapeAbsent", "exp_alerts": [missed]}
    test = {"input_series": listed(series), "alert_rule_test": [alert]}
    run_promtool(tmp_path, test, files=both_files())
