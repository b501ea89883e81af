"""What alerts tell apart: refused by one cell or by all, loading or lost, one system or another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.dashboards.alerts import ALERTS
from deployments.dashboards.recording import SloTargets
from deployments.dashboards.rule_files import rule_files
from tests.deployments.promtool_cases import (
    Case,
    Phases,
    Series,
    counter,
    expect,
    failures_of,
    firing,
    gauge,
    judged,
    listed,
    needs_promtool,
    run_promtool,
)

pytestmark = needs_promtool

_FRONT_END = 'job="f", front_end="x"'


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


def forwards(model: str, calls: float, error_s: float, actual_s: float) -> Series:
    """Of a model, each minute for an hour."""
    counted = {"calls": calls, "absolute_error_seconds": error_s, "actual_seconds": actual_s}
    labels = f'{{job="f", cell="a", model="{model}"}}'
    return {f"flotilla_cost_model_{of}_total{labels}": counter([(60, n)]) for of, n in counted.items()}


#: By name; all are evaluated at once.
CASES: dict[str, Case] = {}

# -- costs -------------------------------------------------------------------------------------------

for num_calls, fires in ((3, 0), (20, 1)):
    # A few short answers an hour: clocks and caches make their forwards slow, which no profile mends.
    CASES[f"{num_calls} calls a minute with a wrong profile"] = Case(
        forwards("target", num_calls, 0.08, 0.1), (expect(firing("FlotillaCostModelDrift"), 50, fires),)
    )

for num_seconds, fires in ((2.4, 0), (1.2, 1)):
    # A lookup's few microseconds beside a target's forwards, against those of a target that has little to do.
    CASES[f"a small drafter with a wrong profile beside {num_seconds} s of forwards a minute"] = Case(
        forwards("lookup", 20, 0.08, 0.1) | forwards("target", 20, 0.0, num_seconds),
        (expect(firing("FlotillaCostModelDrift"), 50, fires),),
    )

# -- refusals ----------------------------------------------------------------------------------------


def exactly(expr: str, value: float) -> dict[str, object]:
    samples = [{"labels": '{job="f", tier="chat"}', "value": value}]
    return {"expr": expr, "eval_time": "50m", "exp_samples": samples}


RATIO = 'flotilla_admission_prediction_ratio_{part}{{job="f", cell="a", objective="ttft"{le}}}'

CASES |= {
    # Half of the requests go to a full cell first, and all are taken.
    "what a full cell refuses and another takes wakes nobody": Case(
        {
            refused_by("a"): counter([(60, 50)]),
            looked_at("a", "rejected"): counter([(60, 50)]),
            looked_at("b", "accepted"): counter([(60, 100)]),
            told("queue_full"): counter([(60, 0)]),
        },
        (
            expect(firing(), 50, 0),
            exactly('sum by (job, tier) (flotilla:queue_refusals:ratio_rate5m{job="f"})', 0),
        ),
    ),
    # Of a hundred, two are refused by each of four cells, and one for its terms.
    "a request that all cells refuse counts once": Case(
        {
            looked_at("a", "accepted"): counter([(60, 970)]),
            told("queue_full"): counter([(60, 20)]),
            told("slo_infeasible"): counter([(60, 10)]),
            **{refused_by(cell): counter([(60, 20)]) for cell in "abcd"},
            **{looked_at(cell, "rejected"): counter([(60, 20)]) for cell in "abcd"},
        },
        (
            expect(firing(), 50, 0),
            exactly('round(1000 * flotilla:queue_refusals:ratio_rate5m{job="f", tier="chat"})', 20),
        ),
    ),
    # Of a tier that would rather be refused than late, nothing is served for hours.
    "a tier that is refused for the objectives it would miss pages": Case(
        {
            **{looked_at("a", decision): counter([(60, 0)]) for decision in ("accepted", "downgraded")},
            looked_at("a", "rejected"): counter([(60, 600)]),
            told("queue_full"): counter([(60, 0)]),
            told("saturated"): counter([(60, 600)]),
            told("slo_infeasible"): counter([(60, 0)]),
        },
        (
            expect(firing("FlotillaQueueSaturated"), 50, 1),
            exactly('sum by (job, tier) (flotilla:queue_refusals:ratio_rate5m{job="f"})', 1),
        ),
    ),
    "full queues and objectives that would be missed count together": Case(
        {
            looked_at("a", "accepted"): counter([(60, 92)]),
            told("queue_full"): counter([(60, 4)]),
            told("saturated"): counter([(60, 4)]),
        },
        (
            expect(firing("FlotillaQueueSaturated"), 50, 1),
            exactly('round(1000 * flotilla:queue_refusals:ratio_rate5m{job="f", tier="chat"})', 80),
        ),
    ),
    # What an idle cell could not do either is its client's mistake.
    "what no cell could ever do wakes nobody": Case(
        {looked_at("a", "accepted"): counter([(60, 50)]), told("slo_infeasible"): counter([(60, 50)])},
        (expect(firing(), 50, 0),),
    ),
    # Their status has no series before the first: of none but these is it a share, and never above all.
    "where all are refused for their keys it is all of them": Case(
        {
            f'flotilla_request_errors_total{{{_FRONT_END}, api="http", code="invalid_api_key"}}': counter(
                [(30, 0), (30, 20)]
            ),
            f'flotilla_http_requests_total{{{_FRONT_END}, route="/v1/completions", status="401"}}': gauge(
                [(35, None), (25, 600)]
            ),
        },
        (
            expect('round(100 * max(flotilla:refused_at_the_door:ratio_rate15m{job="f"}))', 50, 100),
            expect(firing("FlotillaRefusedAtTheDoor"), 59, 1),
        ),
    ),
    # One of ten requests in five minutes, as long as it may last.
    "a refusal now and then wakes nobody": Case(
        {looked_at("a", "accepted"): counter([(60, 1.8)]), told("queue_full"): counter([(60, 0.2)])},
        (expect(firing(), 50, 0),),
    ),
    # All of one request in five minutes.
    "a few requests that were predicted badly raise nothing": Case(
        {
            RATIO.format(part="bucket", le=', le="2.0"'): counter([(60, 0)]),
            RATIO.format(part="count", le=""): counter([(60, 0.2)]),
        },
        (expect(firing(), 50, 0),),
    ),
}

# -- cells that load, and cells that are lost ---------------------------------------------------------

CASES |= {
    # Neither one that takes six minutes nor one that takes half an hour.
    "a cell that loads beside one that serves raises nothing": Case(
        {
            **OPEN,
            **ready("a", [(90, 1)]),
            **ready("b", [(10, None), (6, 0), (74, 1)]),
            **ready("c", [(10, None), (29, 0), (51, 1)]),
        },
        tuple(expect(firing(), minute, 0) for minute in (14, 15, 16, 30, 38, 60)),
    ),
    # Front ends are there before the first cell is, and that before its models.
    "the first installation pages nobody": Case(
        {**OPEN, **ready("a", [(5, None), (20, 0), (65, 1)])},
        tuple(expect(firing(), minute, 0) for minute in (4, 10, 24, 40)),
    ),
    # As when their nodes are drained one after the other: workers of all cells have the same names.
    "a target made again in each of four cells is no worker that keeps failing": Case(
        {
            f'flotilla_worker_restarts_total{{job="f", cell="{cell}", worker="verifier"}}': counter(
                [(20 + at, 0), (1, 1), (60, 0)]
            )
            for at, cell in enumerate("abcd")
        },
        tuple(expect(firing(), minute, 0) for minute in (25, 27, 30)),
    ),
    # Its target and its drafters, and as it was the only one, the system.
    "a cell that was ready is missed at once": Case(
        {**OPEN, **ready("a", [(10, 0), (20, 1), (60, 0)])},
        (
            expect(firing(), 29, 0),
            expect(firing("FlotillaCellDown"), 35, 1),
            expect(firing("FlotillaNoDraftersReady"), 35, 1),
            expect(firing("FlotillaNoCellReady"), 35, 1),
        ),
    ),
}

# -- requests that fail ------------------------------------------------------------------------------

FAILURES: list[Series] = [
    answered("500", [(60, 20)]),
    {**answered("200", [(60, 20)]), **answered("503", [(60, 20)])},
    {**answered("200", [(60, 20)]), **called("INTERNAL", [(60, 20)])},
    {**called("OK", [(60, 20)]), **called("UNAVAILABLE", [(60, 20)])},
    {**answered("200", [(60, 20)]), **broke_off("503", [(60, 20)])},
    {**ended("stop", [(60, 20)]), **ended("error", [(60, 20)])},
    # Few clients, of whom nobody gets an answer.
    answered("500", [(60, 0.5)]),
]
CASES |= {
    f"requests that fail by this system's fault wake somebody, {number}": Case(
        series, (expect(firing("FlotillaRequestsFailing"), 40, 1), expect(firing(), 40, 1))
    )
    for number, series in enumerate(FAILURES)
}

HARMLESS: list[Series] = [
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
]
CASES |= {
    f"what clients do and single failures wake nobody, {number}": Case(
        series, tuple(expect(firing(), minute, 0) for minute in (39, 40, 42, 44, 50))
    )
    for number, series in enumerate(HARMLESS)
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures_of(tmp_path_factory.mktemp("rules"), CASES)


@pytest.mark.parametrize("name", CASES)
def test_alerts_tell_apart(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


def test_what_is_not_as_expected_is_told_by_name(tmp_path: Path) -> None:
    """Of one case alone, whatever the others are."""
    good = CASES["the first installation pages nobody"]
    bad = Case(good.series, (*good.expected, expect(firing(), 10, 1)))
    found = failures_of(tmp_path, {"good": good, "bad": bad, "good again": good})
    assert set(found) == {"bad"}
    assert "10m" in found["bad"]


# -- workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alert", "series", "most"),
    [
        (
            "FlotillaRestartsFlapping",
            'flotilla_worker_restarts_total{{job="{}", cell="a", worker="small"}}',
            3,
        ),
        (
            "FlotillaWorkersStalling",
            'flotilla_worker_stalls_total{{job="{}", cell="a", kind="target", reason="stuck"}}',
            2,
        ),
    ],
)
def test_as_many_losses_as_are_allowed_raise_nothing(
    tmp_path: Path, alert: str, series: str, most: int
) -> None:
    """`increase` extrapolates to the whole window: between two scrapes three of them are 3.2."""
    (rule,) = [one for one in ALERTS if one.name == alert]
    losses = {"as many": most, "one more": most + 1}
    values = {series.format(job): counter([(30, 0), (num, 1), (10, 0)]) for job, num in losses.items()}
    fires = {"labels": '{job="one more"}', "value": 1}
    # Asked for by itself, at a time between two evaluations.
    now = {"expr": f"count by (job) ({rule.expr})", "eval_time": "38m30s", "exp_samples": [fires]}
    run_promtool(tmp_path, {"input_series": listed(values), "promql_expr_test": [now]}, files={})


# -- cells that load for long --------------------------------------------------------------------------


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
    run_promtool(tmp_path, test, is_about_slo=False, files=both_files())
