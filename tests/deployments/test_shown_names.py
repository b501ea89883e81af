"""Names, addresses and paths stand in what commands print as they are: brackets in them are no markup."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deployments import cli, drafters_command, profile_cli, welcome
from tests.cluster.test_profile_file import DRAFTERS, configuration, profile_of

# The first would not be shown; the second would end the command.
NAME = "small[int8][/q4]"
# A name of a drafter has no `/`, which is that of an instance.
DRAFTER = "small[int8]"
CONFIG = configuration(drafters=[{**DRAFTERS[0], "name": DRAFTER}])


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_the_welcome_of_a_server() -> None:
    shown = console()
    described = {"model": f"target {NAME}", "drafters": [NAME]}
    welcome.print_welcome(shown, configuration(), "http://[fd00::1]:8000", described)
    assert f"target {NAME} with {NAME}, policy flotilla, on http://[fd00::1]:8000\n" in printed(shown)


def test_a_list_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    arguments = ["keys", "create", "a", "--file", str(file), "--tier", NAME, "--model", f"m{NAME}"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    listed = CliRunner().invoke(cli.app, ["keys", "list", str(file)], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert f" {NAME} " in listed.output
    assert f" m{NAME} " in listed.output


def test_a_list_of_drafters(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one = {
        "name": NAME, "state": "ready", "load": 0, "max_requests": 4, "restarts": 0, "recovery_s": None,
        "node": "here", "costs": "measured", "waits_for": "",
    }  # fmt: skip
    drafters_command._show({"data": [one]})
    assert f" {NAME} " in capsys.readouterr().out


def test_a_measured_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = profile_of(CONFIG)
    monkeypatch.setattr(profile_cli, "measure_profile", lambda config, report: profile)
    shown, out = console(), tmp_path / "[a]" / "profile.json"
    out.parent.mkdir()
    profile_cli.run_profile(CONFIG, out, console=shown)
    assert f" {DRAFTER} " in printed(shown)
    assert str(out) in printed(shown).replace("\n", "")
    assert json.loads(out.read_text())
