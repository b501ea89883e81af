"""`flotilla replay` at the command line: pipes, disks and records that are not what they should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments import cli
from tests.cluster.recorded_world import live, recorded_world


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    file = tmp_path / "decisions.jsonl"
    live(recorded_world(1, "adaserve", file), 60)
    return file


def test_who_reads_no_further_is_no_fault_of_the_record(recorded: Path) -> None:
    read, write = os.pipe()
    os.close(read)  # as of `| head`
    with os.fdopen(write, "w") as closed:
        command = [sys.executable, "-m", "deployments.cli", "replay", str(recorded)]
        ended = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_schedulers_that_take_turns_are_named_once_where_only_differences_are_asked_for(
    tmp_path: Path,
) -> None:
    """A file that two cells write had a line for each of their turns, hundreds a minute."""
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    live(recorded_world(1, "adaserve", one), 60)
    live(recorded_world(2, "adaserve", other), 60)
    turns = [file.read_bytes().splitlines(keepends=True) for file in (one, other)]
    cut = [len(lines) // 2 for lines in turns]
    both = b""
    for part in (0, 1):
        for lines, half in zip(turns, cut, strict=True):
            # Tables are known for as long as a scheduler's turn lasts.
            tables = [line for line in lines[:half] if b'"record":"calibration"' in line]
            both += b"".join(lines[:half] if part == 0 else [lines[0], *tables, *lines[half:]])
    file = tmp_path / "both.jsonl"
    file.write_bytes(both)
    for flags, number in (([], 4), (["--quiet"], 2)):
        result = CliRunner().invoke(cli.app, ["replay", str(file), *flags])
        assert result.exit_code == 0, result.output
        assert result.output.count("policy adaserve, recorded ") == number


def no_array(step: dict[str, Any]) -> None:
    for one in step["requests"]:
        if "tree" in one:
            one["tree"]["token"] = None


def other_names(table: dict[str, Any]) -> None:
    table["state"] = {f"{name}s": value for name, value in table["state"].items()}


def no_numbers(table: dict[str, Any]) -> None:
    table["state"] = {name: {} for name in table["state"]}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("step", no_array, "is no entry of a record of decisions: Expected `array`, got `NoneType`"),
        ("calibration", other_names, "is none of this version of Flotilla: "),
        ("calibration", no_numbers, "is none of this version of Flotilla: "),
    ],
)
def test_what_is_of_another_version_or_broken_is_told(
    recorded: Path, kind: str, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    entries = [json.loads(line) for line in recorded.read_bytes().splitlines()]
    for entry in entries:
        if entry["record"] == kind:
            change(entry)
    recorded.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    result = CliRunner().invoke(cli.app, ["replay", str(recorded)])
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, message in result.output) == (2, True), result.output[-300:]
