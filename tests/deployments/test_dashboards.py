"""Dashboards keep their rules, say nothing that the catalog does not have, and are what the chart ships."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from typer.testing import CliRunner

from cluster.metric_catalog import CATALOG
from deployments.cli import app
from deployments.dashboards.command import generated
from deployments.dashboards.promql import gauge, rate
from deployments.dashboards.recording import SloTargets
from deployments.dashboards.rule_files import CHART_JOB, rule_files

CHART = Path(__file__).resolve().parents[2] / "helm" / "flotilla"
FILES = generated()
BOARDS = {path: json.loads(text) for path, text in FILES.items() if path.endswith(".json")}
RECORDED = {
    rule["record"]
    for path, text in FILES.items()
    if path.startswith("rules/")
    for group in yaml.safe_load(text)["groups"]
    for rule in group["rules"]
    if "record" in rule
}
#: Of Prometheus itself.
ITS_OWN = {"ALERTS", "up", "scrape_duration_seconds"}
#: What a histogram of the catalog is exposed as.
PARTS = ("_bucket", "_sum", "_count")

each_board = pytest.mark.parametrize("path", BOARDS)


def panels(path: str) -> list[dict[str, Any]]:
    return [panel for panel in BOARDS[path]["panels"] if panel["type"] != "row"]


def expressions(path: str) -> list[str]:
    return [target["expr"] for panel in panels(path) for target in panel["targets"]]


def plain(expr: str) -> str:
    """Without Grafana's variables."""
    expr = expr.replace("$__rate_interval", "1m").replace("$__range", "3h")
    return re.sub(r"\$\w+", ".+", expr)


def nodes(expr: Any) -> Iterator[Any]:
    """An expression and all below it."""
    yield expr
    parts = [getattr(expr, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for part in (*parts, *getattr(expr, "args", ())):
        if part is not None:
            yield from nodes(part)


def selectors(expr: str) -> Iterator[Any]:
    for node in nodes(promql_parser.parse(plain(expr))):
        if isinstance(node, promql_parser.VectorSelector):
            yield node


def of_catalog(name: str) -> str:
    """The metric a series belongs to; the name itself if to none."""
    for part in PARTS:
        if name.endswith(part) and name.removesuffix(part) in CATALOG:
            return name.removesuffix(part)
    return name


# -- what is committed -------------------------------------------------------------------------------


def test_the_chart_ships_what_is_generated() -> None:
    shipped = [*CHART.glob("dashboards/*"), *CHART.glob("rules/*")]
    found = {str(path.relative_to(CHART)): path.read_text() for path in shipped}
    assert found == generated(job=CHART_JOB), "run `make docs`"


@each_board
def test_grafanas_own_types_know_every_key(path: str) -> None:
    plugins.register_default_plugins()
    read = Dashboard.from_json(BOARDS[path])
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == BOARDS[path]


# -- rules for panels --------------------------------------------------------------------------------


@each_board
def test_every_panel_says_what_it_shows(path: str) -> None:
    titles = [panel["title"] for panel in panels(path)]
    assert len(titles) == len(set(titles))
    for panel in panels(path):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]


@each_board
def test_identities_are_unique(path: str) -> None:
    ids = [panel["id"] for panel in BOARDS[path]["panels"]]
    assert None not in ids
    assert len(ids) == len(set(ids))
    for panel in panels(path):
        references = [target["refId"] for target in panel["targets"]]
        assert all(references), panel["title"]
        assert len(references) == len(set(references)), panel["title"]


def test_dashboards_differ() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len({b["title"] for b in BOARDS.values()}) == 6
    assert {Path(path).stem for path in BOARDS} == {board["uid"] for board in BOARDS.values()}


@each_board
def test_the_datasource_is_a_variable_everywhere(path: str) -> None:
    def sources(part: Any) -> Iterator[Any]:
        if isinstance(part, dict):
            if "datasource" in part:
                yield part["datasource"]
            for below in part.values():
                yield from sources(below)
        elif isinstance(part, list):
            for below in part:
                yield from sources(below)

    found = list(sources(BOARDS[path]))
    assert len(found) > len(panels(path))
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in found)


@each_board
def test_variables_are_used_and_declared(path: str) -> None:
    declared = {variable["name"] for variable in BOARDS[path]["templating"]["list"]}
    assert declared == {"datasource", "job", "model", "cell", "tier"}
    queries = [variable.get("definition", "") for variable in BOARDS[path]["templating"]["list"]]
    named = set(re.findall(r"\$(\w+)", " ".join([*queries, *expressions(path)])))
    assert named - {"__rate_interval", "__range"} <= declared
    assert declared - {"datasource", "tier"} <= named
    assert all("$job" in expr for expr in expressions(path))


def test_the_tier_chooses_what_is_kept_by_tier() -> None:
    by_tier = {name for name, metric in CATALOG.items() if "tier" in metric.labels}
    for path in BOARDS:
        for expr in expressions(path):
            for selector in selectors(expr):
                name = of_catalog(selector.name or "")
                labels = {matcher.name for matcher in selector.matchers.matchers}
                assert ("tier" in labels) >= (name in by_tier), expr


@each_board
def test_several_series_have_a_legend_that_tells_them_apart(path: str) -> None:
    for panel in panels(path):
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends), panel["title"]
        assert len(legends) == len(set(legends)), panel["title"]
        if panel["type"] == "timeseries":
            assert panel["options"]["legend"]["showLegend"], panel["title"]
        for target in panel["targets"]:
            parsed = promql_parser.parse(plain(target["expr"]))
            grouped = re.search(r"^(?:\w+) by \(([^)]*)\)", target["expr"])
            if grouped and isinstance(parsed, promql_parser.AggregateExpr):
                for label in grouped[1].split(", "):
                    assert f"{{{{{label}}}}}" in target["legendFormat"], (
                        f"{panel['title']}: {label} is not told"
                    )


@each_board
def test_panels_do_not_overlap(path: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[path]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells


@each_board
def test_it_links_to_the_others(path: str) -> None:
    (link,) = BOARDS[path]["links"]
    assert (link["type"], link["keepTime"], link["includeVars"]) == ("dashboards", True, True)
    assert set(link["tags"]) <= set(BOARDS[path]["tags"])


# -- rules for queries -------------------------------------------------------------------------------

RULES = [
    (f"{path} {rule.get('record') or rule.get('alert')}", rule["expr"])
    for path, text in FILES.items()
    if path.startswith("rules/")
    for group in yaml.safe_load(text)["groups"]
    for rule in group["rules"]
]
QUERIES = [(path, expr) for path in BOARDS for expr in expressions(path)]


def test_every_series_is_declared() -> None:
    for where, expr in QUERIES + RULES:
        for selector in selectors(expr):
            name = selector.name or ""
            assert of_catalog(name) in CATALOG or name in RECORDED | ITS_OWN, f"{where}: {name}"


def test_labels_are_those_of_the_metric() -> None:
    process = {"job", "instance", "cell", "front_end"}
    for where, expr in QUERIES + RULES:
        for selector in selectors(expr):
            metric = CATALOG.get(of_catalog(selector.name or ""))
            if metric is not None:
                labels = {matcher.name for matcher in selector.matchers.matchers}
                assert labels <= {*metric.labels, *process, "le"}, f"{where}: {expr}"


def test_rates_are_of_counters_over_the_interval_of_the_panel() -> None:
    for where, expr in QUERIES + RULES:
        for node in nodes(promql_parser.parse(plain(expr))):
            if isinstance(node, promql_parser.Call) and node.func.name in ("rate", "increase", "irate"):
                series = node.args[0].vector_selector.name
                metric = CATALOG[of_catalog(series)]
                assert metric.kind == "counter" or (metric.kind == "histogram" and series != metric.name), (
                    where
                )
    for where, expr in QUERIES:
        assert set(re.findall(r"rate\([^[]*\[([^]]+)\]", expr)) <= {"$__rate_interval"}, f"{where}: {expr}"
        assert set(re.findall(r"increase\([^[]*\[([^]]+)\]", expr)) <= {"$__range"}, f"{where}: {expr}"
    # A counter as such says nothing: it starts from zero with every process.
    for where, expr in QUERIES:
        counters = [
            s.name
            for s in selectors(expr)
            if CATALOG.get(s.name, CATALOG["flotilla_ready"]).kind == "counter"
        ]
        assert len(counters) == len(re.findall(r"(?:rate|increase)\(\w+_total\{", expr)), f"{where}: {expr}"


def test_what_grows_without_a_divisor_is_not_infinitely_much_of_it() -> None:
    """0 over 0 is not drawn; the scheduler's time over no iterations is drawn as infinite."""
    num_divided = 0
    for where, expr in QUERIES:
        for divisor in re.findall(r"/ scalar\((.*)\)$", expr):
            num_divided += 1
            dividend = expr.removesuffix(f" / scalar({divisor})")
            is_part = {s.name for s in selectors(dividend)} == {s.name for s in selectors(divisor)}
            assert is_part or divisor.endswith(" > 0"), f"{where}: {expr}"
    assert num_divided == 2


def test_quantiles_are_of_buckets_by_le() -> None:
    num_quantiles = 0
    for where, expr in QUERIES:
        for node in nodes(promql_parser.parse(plain(expr))):
            if isinstance(node, promql_parser.Call) and node.func.name == "histogram_quantile":
                num_quantiles += 1
                inner = node.args[1]
                assert "le" in inner.modifier.labels, f"{where}: {expr}"
                assert all(s.name.endswith("_bucket") for s in selectors(expr)), f"{where}: {expr}"
    assert num_quantiles > 10


def test_what_the_catalog_does_not_have_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="it is not there"):
        rate("flotilla_made_up_total")
    with pytest.raises(ValueError, match="it is a gauge"):
        rate("flotilla_ready")
    with pytest.raises(ValueError, match="is no gauge"):
        gauge("flotilla_steps_total")


# -- the command -------------------------------------------------------------------------------------


def test_the_command_writes_rules_for_targets_of_ones_own(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--slo-target", "0.97", "--tier-target", "interactive=0.99"]
    done = CliRunner().invoke(app, ["dashboards", *arguments, "--runbooks", "https://wiki.example/runbooks/"])
    assert done.exit_code == 0, done.output
    (rule,) = yaml.safe_load((tmp_path / "rules/flotilla-slo-target.yaml").read_text())["groups"][0]["rules"]
    assert rule["expr"].splitlines() == [
        '0.99 * group by (job, tier) (flotilla_slo_requests_total{tier="interactive"})',
        "or 0.97 * group by (job, tier) (flotilla_slo_requests_total)",
    ]
    alerts = yaml.safe_load((tmp_path / "rules/flotilla-alerts.yaml").read_text())["groups"][0]["rules"]
    urls = {alert["annotations"]["runbook_url"] for alert in alerts}
    assert "https://wiki.example/runbooks/FlotillaNoCellReady.md" in urls
    assert len(urls) == len(alerts)
    tiers = json.loads((tmp_path / "dashboards/flotilla-tiers.json").read_text())
    steps = tiers["panels"][1]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [step["value"] for step in steps] == [None, 0.97]


@pytest.mark.parametrize("job", ["serving/demo-flotilla", 'a "job" of \\ones own'])
def test_rules_of_one_job_look_at_no_other(job: str) -> None:
    """Of several systems in one Prometheus each has its own targets, and is missed by itself."""
    for text in rule_files(SloTargets(tiers={"bulk": 0.99}), job=job).values():
        for group in yaml.safe_load(text)["groups"]:
            for rule in group["rules"]:
                found = list(selectors(rule["expr"]))
                assert found
                for selector in found:
                    jobs = [one for one in selector.matchers.matchers if one.name == "job"]
                    assert [(one.op, one.value) for one in jobs] == [(promql_parser.MatchOp.Equal, job)]


def test_the_command_narrows_rules_to_a_job(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["dashboards", "--out", str(tmp_path), "--job", "ours"])
    assert done.exit_code == 0, done.output
    written = {path.name: path.read_text() for path in (tmp_path / "rules").iterdir()}
    assert written == rule_files(SloTargets(), job="ours")
    assert 'absent(flotilla_build_info{job="ours"})' in written["flotilla-alerts.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo-target", "0.9"], "at least 0.94"),
        (["--tier-target", "interactive"], "expected a tier and a share"),
        (["--tier-target", "bulk=often"], "expected a tier and a share"),
        (["--tier-target", 'bulk"=0.99'], "expected a tier and a share"),
        (["--tier-target", "bulk=1"], "tier `bulk`"),
    ],
)
def test_a_wrong_target_is_named(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["dashboards", "--out", str(tmp_path), *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert not list(tmp_path.iterdir())


def overview_stat(title: str) -> str:
    (panel,) = (one for one in panels("dashboards/flotilla-overview.json") if one["title"] == title)
    (target,) = panel["targets"]
    return str(target["expr"])


def test_the_share_refused_is_of_what_clients_were_told() -> None:
    """What a cell that is full or drains refuses, another takes: only front ends know who was refused."""
    expr = overview_stat("Refused")
    refused, told, admitted = selectors(expr)
    assert refused.name == told.name == "flotilla_front_end_requests_rejected_total"
    assert admitted.name == "flotilla_admission_decisions_total"
    assert 'decision!="rejected"' in expr
    # Nobody knows which cell somebody whom none took belongs to.
    assert "$cell" not in expr


def test_clients_refusals_are_those_of_front_ends() -> None:
    """Panels of cells' own refusals say so."""
    for path in BOARDS:
        for panel in panels(path):
            if any("flotilla_requests_rejected_total" in target["expr"] for target in panel["targets"]):
                assert panel["title"] == "Refusals of cells"


@pytest.mark.parametrize("title", ["Pages firing", "Tickets firing"])
def test_alerts_that_fire_are_those_of_the_system_shown(title: str) -> None:
    """And of none: that nothing is scraped is an alert without a job."""
    (alerts,) = selectors(overview_stat(title).replace("$job", "(a|b)"))
    (job,) = (matcher for matcher in alerts.matchers.matchers if matcher.name == "job")
    assert job.op == promql_parser.MatchOp.Re
    for name, is_shown in {"a": True, "b": True, "": True, "c": False}.items():
        assert bool(re.fullmatch(job.value, name)) == is_shown


@pytest.mark.parametrize("title", ["Refused", "Budget left over the time shown"])
def test_a_share_of_no_requests_is_shown_as_nothing(title: str) -> None:
    """Zero by zero is NaN, which a single number shows as it is."""
    parsed = nodes(promql_parser.parse(plain(overview_stat(title))))
    divisions = [node for node in parsed if getattr(node, "op", None) is not None and str(node.op) == "/"]
    counts = [node.rhs.prettify() for node in divisions if "slo_target" not in node.rhs.prettify()]
    assert len(counts) == 1
    assert "".join(counts[0].split()).rstrip(")").endswith(">0")
