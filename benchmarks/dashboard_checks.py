"""Every query of dashboards, rules and alerts, and which of them a Prometheus answers with nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from benchmarks.prometheus_server import QueryFailed
from deployments.dashboards.alerts import ALERTS

#: Series of an expression; raises `QueryFailed`.
Ask = Callable[[str], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Check:
    """A query that must return data.

    Attributes:
        where: dashboard or rule file.
        what: panel, variable, rule or alert.
        expr: PromQL, without variables.
        may_be_empty: it is run, but returns data in an incident only.
    """

    where: str
    what: str
    expr: str
    may_be_empty: bool = False


@dataclass(frozen=True, slots=True)
class Dead:
    """A query that returned nothing, and why that is known."""

    check: Check
    reason: str


def all_checks(files: Mapping[str, str], window: str, shown: str) -> list[Check]:
    """Every query.

    Args:
        files: generated files by path (`deployments.dashboards.command.generated`).
        window: what `$__rate_interval` stands for.
        shown: what `$__range` stands for.
    """
    checks: list[Check] = []
    for path, text in files.items():
        if path.endswith(".json"):
            checks += dashboard_checks(path, json.loads(text), window, shown)
        else:
            checks += rule_checks(path, yaml.safe_load(text))
    return [*checks, *alert_checks()]


def dashboard_checks(path: str, dashboard: Mapping[str, Any], window: str, shown: str) -> Iterator[Check]:
    """Queries of variables and panels."""
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    for variable in dashboard["templating"]["list"]:
        listed = re.fullmatch(r"label_values\((.+), (\w+)\)", variable.get("definition", ""))
        if listed:
            expr = f"count by ({listed[2]}) ({listed[1]})"
            yield Check(path, f"${variable['name']}", substituted(expr, names, window, shown))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            what = f"{panel['title']} ({target['refId']})"
            yield Check(path, what, substituted(target["expr"], names, window, shown))


def rule_checks(path: str, rules: Mapping[str, Any]) -> Iterator[Check]:
    """Recorded series, and what they are computed from; alerts as they are, which are empty in good times."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                yield Check(path, f"{rule['record']} recorded", rule["record"])
                yield Check(path, f"{rule['record']} computed", rule["expr"])
            else:
                yield Check(path, f"{rule['alert']} fires", rule["expr"], may_be_empty=True)


def alert_checks() -> Iterator[Check]:
    """Values that alerts compare with their thresholds."""
    for alert in ALERTS:
        for number, condition in enumerate(alert.conditions, start=1):
            yield Check("alerts", f"{alert.name} value {number}", condition.value)


def substituted(expr: str, variables: Sequence[str], window: str, shown: str) -> str:
    """The expression with all of Grafana's variables replaced, every choice being "All"."""
    expr = expr.replace("$__rate_interval", window).replace("$__range", shown)
    for name in variables:
        expr = re.sub(rf"\$(?:{name}\b|{{{name}}})", ".+", expr)
    return expr


def dead(checks: Sequence[Check], ask: Ask) -> list[Dead]:
    """Those that fail, and those without a single number that should have one."""
    found = []
    for check in checks:
        try:
            series = ask(check.expr)
        except QueryFailed as error:
            found.append(Dead(check, f"refused: {error}"))
            continue
        if check.may_be_empty:
            continue
        numbers = [float(value) for one in series for _, value in one["values"]]
        if not numbers:
            found.append(Dead(check, "no series"))
        elif not any(math.isfinite(number) for number in numbers):
            found.append(Dead(check, f"{len(series)} series without a number"))
    return found
