"""Every alert has its page, and what the pages tell an operator to ask and to run exists."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser
import pytest
import typer

from cluster.metric_catalog import CATALOG
from deployments.cli import app
from deployments.dashboards.alerts import ALERTS, Alert
from deployments.dashboards.recording import SloTargets, recording_groups, target_group

RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks"
INDEX = "README.md"
PAGES = {path.name: path.read_text() for path in sorted(RUNBOOKS.glob("*.md"))}
GROUPS = [target_group(SloTargets()), *recording_groups()]
RECORDED = {rule.record for group in GROUPS for rule in group.rules}

each_page = pytest.mark.parametrize("page", PAGES)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_page(alert: Alert) -> None:
    text = PAGES[alert.runbook]
    assert text.startswith(f"# {alert.name}\n")
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## Meaning", "## Impact", "## Diagnosis", "## Mitigation"]
    assert blocks(alert.runbook, "promql")
    assert blocks(alert.runbook, "bash")


def test_every_page_has_an_alert() -> None:
    assert set(PAGES) == {alert.runbook for alert in ALERTS} | {INDEX}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_page_says_what_its_commands_need(alert: Alert) -> None:
    """Addresses and keys are set up once, on the page that all link to."""
    text = PAGES[alert.runbook]
    assert f"]({INDEX}#before-you-begin)" in text
    prepared = set(re.findall(r"^export (\w+)=", "\n".join(blocks(INDEX, "bash")), flags=re.MULTILINE))
    code = "\n".join([*blocks(alert.runbook, "bash"), *re.findall(r"`([^`\n]+)`", text)])
    assert set(re.findall(r"\$(\w+)", code)) <= prepared


@each_page
def test_commands_work_where_keys_are_wanted(page: str) -> None:
    code = "\n".join([*blocks(page, "bash"), *re.findall(r"`([^`\n]+)`", PAGES[page])])
    for command in re.findall(r"\bcurl [^\n|]*", code):
        assert ('"$URL' in command) == ('-H "$AUTH"' in command), f"{page}: {command}"
        assert "http://127" not in command, f"{page}: {command}"
    for command in re.findall(r"\bflotilla (?:drafters|timeline)\b[^\n`]* [^\n`]*", code):
        if len(command.split()) > 3:  # else it is only named
            assert '--url "$URL"' in command, f"{page}: {command}"


@each_page
def test_queries_of_a_page_are_of_metrics_that_exist(page: str) -> None:
    for block in blocks(page, "promql"):
        for query in re.split(r"\n(?! )", block.strip()):  # a query goes on in indented lines
            promql_parser.parse(query)
            for name in re.findall(r"\bflotilla[_:][a-z0-9_:]+", query):
                metric = re.sub(r"_(bucket|sum|count)$", "", name)
                assert {name, metric} & (CATALOG.keys() | RECORDED), f"{page}: {name}"


@each_page
def test_commands_of_a_page_exist(page: str) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    code = "\n".join([*blocks(page, "bash"), *re.findall(r"`([^`\n]+)`", PAGES[page])])
    for command, rest in re.findall(r"\bflotilla ([a-z]+)([^\n;]*)", code):
        assert command in commands, f"{page}: flotilla {command}"
        found = commands[command]
        words = rest.split()
        if hasattr(found, "commands"):
            assert words[0] in found.commands, f"{page}: flotilla {command} {words[0]}"
            found = found.commands[words[0]]
        known = {
            option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        if known - {"--help"}:  # else it hands its arguments on
            options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert options <= known, f"{page}: {command}{rest}"
