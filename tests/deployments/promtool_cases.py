"""Synthetic series as promtool reads them, and what is expected of the rules at them."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from deployments.dashboards.recording import SloTargets
from deployments.dashboards.rule_files import rule_files

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on the PATH (Debian: apt install prometheus)"
)

FILES = rule_files(SloTargets(tiers={"strict": 0.99}), "https://wiki.example")
#: Values of a series in phases: how many steps, and by how much a counter grows or what a gauge is in each.
Phases = list[tuple[int, float | None]]
Series = dict[str, str]


def counter(phases: Phases) -> str:
    """promtool's notation of a counter that grows by so much in each step."""
    total, parts = 0.0, []
    for steps, growth in phases:
        assert growth is not None
        parts.append(f"{total + growth:g}+{growth:g}x{steps - 1}")
        total += growth * steps
    return " ".join(parts)


def gauge(phases: Phases) -> str:
    """promtool's notation of a gauge; None is no sample."""
    return " ".join(f"_x{steps}" if at is None else f"{at:g}+0x{steps - 1}" for steps, at in phases)


def lives(name: str, phases: Phases) -> Series:
    """Whether a cell is ready from when it begins; at the end it is gone, and Prometheus knows that."""
    return {f'flotilla_ready{{job="f", cell="{name}"}}': f"{gauge(phases)} stale"}


def made_again(begin: int, end: int, loads: int, serves: int) -> Series:
    """Cells in the same place, each with an id of its own, of which each loads and serves for so long."""
    found: Series = {}
    for at in range(begin, end, loads + serves):
        found |= lives(f"cell-{at}", [(at, None), (loads, 0), *([(serves, 1.0)] if serves else [])])
    return found


def judged(phases: list[tuple[int, float]], per_step: float = 100.0, tier: str = "chat") -> Series:
    """Requests of a tier, of which in each phase such a share misses its objectives."""
    name = f'flotilla_slo_requests_total{{job="f", cell="a", objective="all", tier="{tier}", attained='
    return {
        f'{name}"true"}}': counter([(steps, per_step * (1 - missed)) for steps, missed in phases]),
        f'{name}"false"}}': counter([(steps, per_step * missed) for steps, missed in phases]),
    }


def firing(alert: str = "", job: str = "f") -> str:
    """How many alerts of a system fire; an empty `job` is that of alerts of no system."""
    chosen = f'alertname="{alert}", ' if alert else ""
    return f'count(ALERTS{{{chosen}alertstate="firing", job="{job}"}}) or vector(0)'


def expect(expr: str, minute: int, value: float) -> dict[str, object]:
    samples = [{"labels": "{}", "value": value}]
    return {"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples}


@functools.cache
def groups_of(text: str, is_about_slo: bool) -> tuple[str, list[str]]:
    """A file's rules, without what is slow where it is not asked for, and names of its groups."""
    groups = yaml.load(text, Loader=yaml.CSafeLoader)["groups"]
    # Most of promtool's time goes into the windows of attainment.
    kept = [group for group in groups if is_about_slo or "flotilla-slo" not in group["name"]]
    return yaml.dump({"groups": kept}, Dumper=yaml.CSafeDumper), [group["name"] for group in kept]


def promtool(
    directory: Path, test: dict[str, object], step: int, is_about_slo: bool, files: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    order: list[str] = []
    for name, text in files.items():
        kept, names = groups_of(text, is_about_slo)
        (directory / name).write_text(kept)
        order += names
    document = {
        "rule_files": list(files),
        "evaluation_interval": f"{step}m",
        "group_eval_order": order,
        "tests": [{"interval": f"{step}m", **test}],
    }
    (directory / "test.yaml").write_text(yaml.dump(document, Dumper=yaml.CSafeDumper, sort_keys=False))
    return subprocess.run(
        ["promtool", "test", "rules", "test.yaml"],
        cwd=directory,
        env={**os.environ, "GOGC": "400"},  # by default a fifth of its time goes into collecting garbage
        capture_output=True,
        text=True,
        timeout=60,
    )


def run_promtool(
    tmp_path: Path,
    test: dict[str, object],
    step: int = 1,
    *,
    is_about_slo: bool = True,
    files: Mapping[str, str] = FILES,
) -> None:
    done = promtool(tmp_path, test, step, is_about_slo, files)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Case:
    """Series of a system, which is `job="f"` in all of them, and what is expected of it alone."""

    series: Series
    expected: tuple[dict[str, object], ...]


def failures_of(
    directory: Path, cases: Mapping[str, Case], step: int = 1, *, is_about_slo: bool = False
) -> dict[str, str]:
    """What promtool says of each case that is not as it is expected to be, by name.

    Most of its time goes into evaluating each rule at each step, for one series or hundreds: all cases are
    evaluated at once, each as a system of its own.
    """
    inputs: list[dict[str, str]] = []
    expected: list[dict[str, object]] = []
    jobs = {f"case-{number}": name for number, name in enumerate(cases)}
    for job, name in jobs.items():
        of_case = {"input_series": listed(cases[name].series), "promql_expr_test": list(cases[name].expected)}
        moved = json.loads(json.dumps(of_case).replace(r"job=\"f\"", rf"job=\"{job}\""))
        inputs += moved["input_series"]
        expected += moved["promql_expr_test"]
    # An alert that lost its label of the system would be missed by all of them.
    times = sorted({str(one["eval_time"]) for one in expected})
    expected += [{**expect(firing(job=""), 0, 0), "eval_time": time} for time in times]
    test: dict[str, object] = {"input_series": inputs, "promql_expr_test": expected}
    done = promtool(directory, test, step, is_about_slo, FILES)
    found: dict[str, str] = {}
    for failure in done.stdout.split("expr: ")[1:] + done.stderr.split("expr: ")[1:]:
        job = re.search(r'job=\\"(case-\d+)\\"', failure)
        assert job, failure
        found[jobs[job[1]]] = found.get(jobs[job[1]], "") + failure
    assert found or done.returncode == 0, done.stdout + done.stderr
    return found


def listed(series: Series) -> list[dict[str, str]]:
    told = 'flotilla_build_info{job="f", cell="other", version="1", python="3"}'
    alive = {} if any(name.startswith("flotilla_build_info") for name in series) else {told: "1+0x200"}
    return [{"series": name, "values": values} for name, values in {**alive, **series}.items()]
