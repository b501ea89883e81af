"""The check of dashboards notices a metric that went away: on a recorded Prometheus with its rules."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import dashboard_checks as checking
from benchmarks.prometheus_server import Prometheus, QueryFailed
from cluster.metric import Metric, Process
from cluster.metric_catalog import CAUSES, OBJECTIVES, exposed_by
from cluster.metric_set import MetricSet
from deployments.dashboards.command import generated

STEP_S = 5
NUM_STEPS = 24
#: What is exposed under another name than the dashboards know.
GONE, RENAMED = "flotilla_step_seconds", "flotilla_step_time_seconds"
VALUES: dict[str, tuple[str, ...]] = {
    "attained": ("true", "false"),
    "cause": CAUSES,
    "code": ("queue_full", "saturated", "invalid_api_key"),
    "decision": ("accepted", "rejected"),
    "kind": ("cell", "front_end"),
    "method": ("Generate",),
    "objective": (*OBJECTIVES, "all"),
    "outcome": ("drafted", "verified", "accepted"),
    "phase": ("draft", "verify", "target", "schedule", "other", "decode", "prefill"),
    "route": ("/v1/completions",),
    "signal": (
        "attainment",
        "idle_tpot_s",
        "background_running",
        "max_running",
        "queue_s",
        "running",
        "tokens_per_s",
        "tpot_s",
    ),
    "status": ("200", "404", "500"),
}


def combinations(metric: Metric) -> Iterator[tuple[str, ...]]:
    return itertools.product(*(VALUES.get(label, ("one",)) for label in metric.labels))


def expositions() -> Iterator[str]:
    """What a whole system exposes, step by step: every metric of the catalog with every known label."""
    constants: dict[Process, dict[str, str]] = {
        "cell": {"cell": "c"},
        "front_end": {"front_end": "f"},
        "gathered": {},
    }
    sets = [(process, MetricSet(process, {"job": "flotilla", **own})) for process, own in constants.items()]
    for _ in range(NUM_STEPS):
        for process, metrics in sets:
            for metric in exposed_by(process):
                for labels in combinations(metric):
                    if metric.kind == "counter":
                        metrics.counter(metric.name, *labels).inc(50)
                    elif metric.kind == "gauge":
                        metrics.gauge(metric.name, *labels).set(0.5)
                    else:
                        metrics.histogram(metric.name, *labels).observe(0.02)
        own = 'up{job="flotilla"} 1\nscrape_duration_seconds{job="flotilla"} 0.1\n'
        yield "".join(metrics.render() for _, metrics in sets) + own


def record(directory: Path, end: float) -> Path:
    """A database of those expositions, the last of them at `end`."""
    lines = []
    for index, text in enumerate(expositions()):
        at = end - (NUM_STEPS - 1 - index) * STEP_S
        samples = [line for line in text.splitlines() if not line.startswith("#")]
        lines += [f"{line.replace(GONE, RENAMED)} {at:.0f}" for line in samples]
    (directory / "samples.om").write_text("\n".join([*lines, "# EOF\n"]))
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "samples.om", "data"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "data"


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return generated()


@pytest.mark.skipif(
    None in (shutil.which("prometheus"), shutil.which("promtool")),
    reason="prometheus and promtool are not on the PATH (Debian: apt install prometheus)",
)
def test_exactly_the_queries_of_a_renamed_metric_are_dead(files: dict[str, str], tmp_path: Path) -> None:
    begun = int(time.time())
    data = record(tmp_path, begun)
    rules = {path.rpartition("/")[2]: text for path, text in files.items() if path.startswith("rules/")}
    checks = checking.all_checks(files, "30s", "60s")
    using = {check for check in checks if GONE in check.expr}
    assert {check.what for check in using} >= {"Step (A)", "Step (B)", "Step (C)", "Steps by duration (A)"}
    with Prometheus({}, rules, data=data) as prometheus:

        def ask(expr: str) -> list[dict[str, object]]:
            return prometheus.query_range(expr, begun - 60, time.time(), 1.0)

        # Groups of rules are evaluated each at its own moment, the first time some seconds after the start.
        recorded = [check for check in checks if check.what.endswith(" recorded")]
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and checking.dead(recorded, ask):
            time.sleep(0.2)
        found = checking.dead(checks, ask)
        with pytest.raises(QueryFailed, match="parse error"):
            ask("rate(")
    assert {one.check for one in found} == using
    assert {one.reason for one in found} == {"no series"}


def test_not_a_number_is_no_data() -> None:
    check = checking.Check("a", "b", "0 / 0")
    (dead,) = checking.dead([check], lambda expr: [{"values": [[0, "NaN"], [1, "+Inf"]]}])
    assert dead.reason == "1 series without a number"
    assert checking.dead([check], lambda expr: [{"values": [[0, "NaN"], [1, "0"]]}]) == []


def test_a_refused_query_is_dead_also_if_it_may_be_empty() -> None:
    def refuse(expr: str) -> list[dict[str, object]]:
        raise QueryFailed("parse error")

    check = checking.Check("a", "b", "rate(", may_be_empty=True)
    (dead,) = checking.dead([check], refuse)
    assert dead.reason == "refused: parse error"
    assert checking.dead([check], lambda expr: []) == []


def test_every_query_of_every_file_is_asked(files: dict[str, str]) -> None:
    checks = checking.all_checks(files, "30s", "60s")
    for path, text in files.items():
        count = text.count('"expr":') if path.endswith(".json") else text.count("expr:")
        assert count > 0
        asked = [one for one in checks if one.where == path and not one.what.startswith("$")]
        assert len(asked) >= count - 1, path  # the annotation of alerts is empty in good times
    assert not [one for one in checks if "$" in one.expr]
