"""Alerts in synthetic incidents: each fires, each resolves, none fires in good times (by promtool)."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployments.dashboards.alerts import ALERTS
from tests.deployments.promtool_cases import (
    FILES,
    Case,
    Series,
    counter,
    expect,
    failures_of,
    firing,
    gauge,
    judged,
    listed,
    made_again,
    needs_promtool,
    run_promtool,
)

pytestmark = needs_promtool


@dataclass(frozen=True)
class Incident:
    """Series, and when the alert fires, in minutes from the start.

    At the first of `quiet_at` all is well and no alert fires at all; at the others, this one does not: those
    with longer windows remember the incident for longer.
    """

    alert: str
    series: Series
    fires_at: int
    quiet_at: tuple[int, ...]
    step: int = 1


def expectations(incident: Incident, job: str = "f") -> list[dict[str, object]]:
    before, *others = incident.quiet_at
    return [
        expect(firing(), before, 0),
        expect(firing(job=""), before, 0),
        *(expect(firing(incident.alert, job), minute, 0) for minute in others),
        expect(firing(incident.alert, job), incident.fires_at, 1),
    ]


def drafter(outcome: str) -> str:
    return f'flotilla_drafter_tokens_total{{job="f", cell="a", drafter="small", outcome="{outcome}"}}'


def cost(part: str) -> str:
    return f'flotilla_cost_model_{part}_seconds_total{{job="f", cell="a", model="target"}}'


COST_CALLS = 'flotilla_cost_model_calls_total{job="f", cell="a", model="target"}'
ADMITTED = 'flotilla_admission_decisions_total{job="f", cell="a", tier="chat", decision='
REFUSED = 'flotilla_front_end_requests_rejected_total{job="f", front_end="x", tier="chat", code="queue_full"}'
DENIED = 'flotilla_request_errors_total{job="f", front_end="x", api="http", code="invalid_api_key"}'
EXPIRY = 'flotilla_tls_certificate_expiry_timestamp_seconds{job="f", front_end="x"}'
DAY_S = 86_400
ANSWERED = (
    'flotilla_http_requests_total{job="f", front_end="x", route="/v1/completions", method="POST", status='
)
RATIO = 'flotilla_admission_prediction_ratio_{part}{{job="f", cell="a", objective="ttft"{le}}}'
WITHIN, EVERY = RATIO.format(part="bucket", le=', le="2.0"'), RATIO.format(part="count", le="")

INCIDENTS = [
    # Of these four the shorter window has two samples or three: more would only take longer.
    # Ten minutes into it the hour is not spoiled yet; ten minutes after it the five minutes are clean again.
    Incident(
        "FlotillaErrorBudgetBurn1h", judged([(30, 0.01), (30, 0.9), (30, 0.01)]), 118, (58, 70, 132), step=2
    ),
    Incident(
        "FlotillaErrorBudgetBurn6h", judged([(36, 0.01), (33, 0.4), (9, 0.01)]), 680, (350, 400, 740), step=10
    ),
    Incident(
        "FlotillaErrorBudgetBurn1d",
        judged([(36, 0.01), (36, 0.2), (9, 0.01)]),
        2840,
        (1400, 1720, 3080),
        step=40,
    ),
    Incident(
        "FlotillaErrorBudgetBurn3d",
        judged([(36, 0.01), (24, 0.08), (6, 0.01)]),
        7080,
        (4200, 4560, 7800),
        step=120,
    ),
    Incident(
        "FlotillaNoCellReady",
        {
            'flotilla_ready{job="f", cell="a"}': gauge([(10, 1), (15, None), (10, 1)]),
            'flotilla_http_requests_open{job="f", front_end="x"}': gauge([(35, 3)]),
        },
        20,
        (9, 30),
    ),
    Incident(
        "FlotillaRequestsFailing",
        {
            f'{ANSWERED}"200"}}': counter([(20, 50), (20, 0), (20, 50)]),
            f'{ANSWERED}"500"}}': counter([(20, 1), (20, 50), (20, 1)]),
        },
        35,
        (19, 22, 55),
    ),
    Incident(
        "FlotillaCellDown",
        {
            'flotilla_ready{job="f", cell="a"}': gauge([(10, 1), (10, 0), (10, 1)]),
            'flotilla_ready{job="f", cell="b"}': gauge([(30, 1)]),
        },
        15,
        (9, 12, 25),
    ),
    Incident(
        "FlotillaCellIncomplete",
        {
            'flotilla_ready{job="f", cell="a"}': gauge([(70, 1)]),
            'flotilla_drafters_ready{job="f", cell="a", drafter="small"}': gauge([(10, 2), (40, 0), (20, 1)]),
            'flotilla_drafters_ready{job="f", cell="a", drafter="lookup"}': gauge([(70, 1)]),
        },
        45,
        (9, 35, 55),
    ),
    Incident(
        "FlotillaCellsRestarting",
        {'flotilla_ready{job="f", cell="a"}': gauge([(190, 1)]), **made_again(10, 110, loads=4, serves=0)},
        100,
        (9, 70, 180),
    ),
    Incident(
        "FlotillaNoDraftersReady",
        {
            'flotilla_drafters_ready{job="f", cell="a", drafter="small"}': gauge([(10, 2), (10, 0), (10, 1)]),
            'flotilla_drafters_ready{job="f", cell="a", drafter="lookup"}': gauge([(5, 1), (25, 0)]),
        },
        14,
        (9, 25),
    ),
    Incident(
        "FlotillaRestartsFlapping",
        {
            'flotilla_worker_restarts_total{job="f", cell="a", worker="small"}': counter(
                [(30, 0), (10, 1), (30, 0)]
            )
        },
        39,
        (29, 32, 60),
    ),
    Incident(
        "FlotillaWorkersStalling",
        {
            'flotilla_worker_stalls_total{job="f", cell="a", kind="target", reason="silent"}': counter(
                [(30, 0), (10, 0.5), (30, 0)]
            ),
            'flotilla_worker_stalls_total{job="f", cell="a", kind="target", reason="stuck"}': counter(
                [(70, 0)]
            ),
        },
        39,
        (29, 32, 60),
    ),
    Incident(
        "FlotillaQueueSaturated",
        {
            f'{ADMITTED}"accepted"}}': counter([(20, 50), (20, 50), (20, 50)]),
            f'{ADMITTED}"rejected"}}': counter([(20, 1), (20, 50), (20, 0)]),
            REFUSED: counter([(20, 1), (20, 50), (20, 0)]),
        },
        35,
        (19, 22, 50),
    ),
    Incident(
        "FlotillaRefusedAtTheDoor",
        {
            f'{ANSWERED}"200"}}': counter([(30, 50), (40, 50), (40, 50)]),
            DENIED: counter([(30, 1), (40, 50), (40, 1)]),
        },
        65,
        (29, 35, 100),
    ),
    Incident(
        "FlotillaKvPressure",
        {'flotilla_kv_cache_usage_ratio{job="f", cell="a"}': gauge([(20, 0.9), (30, 1), (20, 0.5)])},
        45,
        (19, 25, 60),
    ),
    Incident(
        "FlotillaCostModelDrift",
        {
            cost("absolute_error"): counter([(30, 1), (40, 8), (40, 1)]),
            cost("actual"): counter([(110, 10)]),
            COST_CALLS: counter([(110, 100)]),
        },
        65,
        (29, 40, 100),
    ),
    Incident(
        "FlotillaAcceptanceCollapse",
        {
            drafter("verified"): counter([(120, 5000)]),
            drafter("accepted"): counter([(80, 3000), (12, 500), (28, 3000)]),
        },
        455,
        (395, 410, 520),
        step=5,
    ),
    Incident(
        "FlotillaAdmissionMispredicts",
        {WITHIN: counter([(30, 9), (40, 4), (40, 10)]), EVERY: counter([(110, 10)])},
        65,
        (29, 35, 100),
    ),
    Incident(
        "FlotillaMemberNotScraped",
        {'flotilla_member_scraped{job="f", kind="cell", member="a"}': gauge([(10, 1), (10, 0), (10, 1)])},
        18,
        (9, 13, 25),
    ),
    Incident(
        "FlotillaScrapeAbsent",
        {
            'flotilla_build_info{job="f", cell="a", version="1", python="3"}': gauge(
                [(10, 1), (20, None), (10, 1)]
            )
        },
        25,
        (9, 14, 35),
    ),
    # Renewed after it had expired.
    Incident(
        "FlotillaCertificateExpires2d",
        {EXPIRY: gauge([(42, 20 * DAY_S), (12, 110 * DAY_S)])},
        41 * 720,
        (10 * 720, 35 * 720, 43 * 720),
        step=720,
    ),
    Incident(
        "FlotillaCertificateExpires14d",
        {EXPIRY: gauge([(42, 20 * DAY_S), (12, 110 * DAY_S)])},
        13 * 720,
        (10 * 720, 11 * 720, 43 * 720),
        step=720,
    ),
]


#: They evaluate the same rules in the same steps.
TOGETHER = {
    incident.alert: Case(incident.series, tuple(expectations(incident)))
    for incident in INCIDENTS
    if incident.step == 1 and incident.alert != "FlotillaScrapeAbsent"
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures_of(tmp_path_factory.mktemp("rules"), TOGETHER)


@pytest.mark.parametrize("alert", TOGETHER)
def test_an_alert_fires_in_its_incident_and_resolves(alert: str, failures: dict[str, str]) -> None:
    assert alert not in failures, failures[alert]


# The first is among `BURNS`.
ALONE = [incident for incident in INCIDENTS[1:] if incident.alert not in TOGETHER]


@pytest.mark.parametrize("incident", ALONE, ids=lambda incident: incident.alert)
def test_an_alert_fires_in_its_incident_in_other_steps(incident: Incident, tmp_path: Path) -> None:
    # Of no system: there is none.
    job = "" if incident.alert == "FlotillaScrapeAbsent" else "f"
    test = {"input_series": listed(incident.series), "promql_expr_test": expectations(incident, job)}
    run_promtool(tmp_path, test, incident.step, is_about_slo="Burn" in incident.alert)


def test_every_alert_has_an_incident() -> None:
    assert [incident.alert for incident in INCIDENTS] == [alert.name for alert in ALERTS]


@pytest.mark.thorough
def test_a_target_of_its_own_makes_a_tier_stricter(tmp_path: Path) -> None:
    """30 % missed is 6 times what 0.95 allows, and 30 times what 0.99 does."""
    strict, chat = judged([(45, 0.3)], tier="strict"), judged([(45, 0.3)])
    tiers = [
        expect(
            'count(ALERTS{alertname="FlotillaErrorBudgetBurn1h", tier="strict", alertstate="firing"})', 80, 1
        ),
        expect(firing("FlotillaErrorBudgetBurn1h"), 80, 1),
    ]
    run_promtool(tmp_path, {"input_series": listed({**strict, **chat}), "promql_expr_test": tiers}, step=2)


#: Of the rules of attainment, in steps of two minutes.
BURNS = {
    "an alert fires in its incident and resolves": Case(
        INCIDENTS[0].series, tuple(expectations(INCIDENTS[0]))
    ),
    "a tier that is never attained burns too": Case(
        # It has no series with `attained="true"` if nobody configured it.
        {name: values for name, values in judged([(45, 1.0)]).items() if "false" in name},
        (expect(firing("FlotillaErrorBudgetBurn1h"), 80, 1),),
    ),
    # Three of 24 in two hours, which is 12 times what a target of 0.99 allows.
    "single missed requests of a strict tier wake nobody": Case(
        judged([(60, 0.125)], per_step=0.4, tier="strict"),
        tuple(expect(firing(), minute, 0) for minute in (62, 90, 118)),
    ),
    "a few missed requests wake nobody": Case(
        # Eight requests in two hours, all missed; and a tier without any.
        {
            **judged([(60, 1.0)], per_step=8 / 60),
            **judged([(60, 0.0)], per_step=0.0, tier="idle"),
        },
        tuple(expect(firing(), minute, 0) for minute in (62, 90, 118)),
    ),
}


@pytest.fixture(scope="module")
def failures_of_burns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures_of(tmp_path_factory.mktemp("rules"), BURNS, step=2, is_about_slo=True)


@pytest.mark.parametrize("name", BURNS)
def test_who_burns_and_who_does_not(name: str, failures_of_burns: dict[str, str]) -> None:
    assert name not in failures_of_burns, failures_of_burns[name]


def test_annotations_name_the_values(tmp_path: Path) -> None:
    incident = next(one for one in INCIDENTS if one.alert == "FlotillaQueueSaturated")
    annotations = {
        "summary": "Tier chat of f is refused for overload.",
        "description": "50% of its requests were refused with `queue_full` or `saturated`, by all cells, "
        "over the last 5 minutes.",
        "runbook_url": "https://wiki.example/FlotillaQueueSaturated.md",
    }
    alert = {
        "exp_labels": {"severity": "page", "job": "f", "tier": "chat"},
        "exp_annotations": annotations,
    }
    expected = {"eval_time": "35m", "alertname": incident.alert, "exp_alerts": [alert]}
    test = {"input_series": listed(incident.series), "alert_rule_test": [expected]}
    run_promtool(tmp_path, test, is_about_slo=False)


def test_promtool_finds_nothing_wrong(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    found = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", *FILES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_documented_routes_are_accepted_and_name_alerts(tmp_path: Path) -> None:
    if shutil.which("amtool") is None:
        pytest.skip("amtool is not on the PATH (Debian: apt install prometheus-alertmanager)")
    document = (Path(__file__).resolve().parents[2] / "docs" / "dashboards.md").read_text()
    (text,) = re.findall(r"```yaml\n(route:.*?)```", document, flags=re.DOTALL)
    path = tmp_path / "alertmanager.yml"
    path.write_text(text)
    found = subprocess.run(["amtool", "check-config", str(path)], capture_output=True, text=True, timeout=30)
    assert found.returncode == 0, found.stdout + found.stderr
    assert set(re.findall(r'alertname="(\w+)"', text)) <= {alert.name for alert in ALERTS}
    labels = ["severity=page", "alertname=FlotillaNoCellReady", "job=f"]
    routed = ["amtool", "config", "routes", "test", f"--config.file={path}", "--verify.receivers=pager"]
    assert subprocess.run([*routed, *labels], capture_output=True, timeout=30).returncode == 0
