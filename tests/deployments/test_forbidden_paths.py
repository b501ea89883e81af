"""Files and directories that the operating system keeps from who starts a server, or that no log can be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.config import FlotillaConfig
from deployments import cli, preflight
from deployments.demo import demo_config


@pytest.fixture
def forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in a directory of another user's. The system hides nothing from root, as whom tests may run."""
    place = tmp_path / "theirs"
    place.mkdir()
    stat, access = os.stat, os.access

    def refusing(path: Any, *args: Any, **extra: Any) -> os.stat_result:
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(f"{place}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **extra)

    def denying(path: Any, mode: int) -> bool:
        return not str(path).startswith(str(place)) and access(path, mode)

    monkeypatch.setattr(os, "stat", refusing)
    monkeypatch.setattr(os, "access", denying)
    return place / "model"


def config_with(**sections: object) -> FlotillaConfig:
    return FlotillaConfig.model_validate(
        demo_config().model_dump(mode="json") | {"http": {"port": 0}} | sections
    )


def test_a_model_in_a_directory_of_others_is_told(forbidden: Path) -> None:
    config = config_with(target={"path": str(forbidden)})
    with pytest.raises(preflight.StartError, match=rf"cannot read {forbidden}\S*: Permission denied"):
        preflight.check(config)


def test_an_adapter_in_a_directory_of_others_is_told(forbidden: Path) -> None:
    target = {"path": "zoo:target-8x384", "adapters": [{"name": "terse", "path": str(forbidden)}]}
    with pytest.raises(preflight.StartError, match=rf"cannot read {forbidden}\S*: Permission denied"):
        preflight.check(config_with(target=target))


def test_a_record_in_a_directory_of_others_is_said_before(forbidden: Path) -> None:
    (warning,) = preflight.check(config_with(debug={"decisions_file": str(forbidden)}))
    assert "cannot be written on this machine" in warning


def test_a_keys_file_in_a_directory_of_others_is_told(forbidden: Path) -> None:
    result = CliRunner().invoke(cli.app, ["keys", "create", "mine", "--file", str(forbidden)])
    assert result.exit_code == 2
    assert f"cannot read the keys in {forbidden}: Permission denied" in result.output


def test_a_log_that_cannot_be_written_is_told_before_anything_starts(
    forbidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cell would start, and Ray Serve says so only after it has tried for minutes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "file" / "all.log", forbidden):
        with pytest.raises(preflight.StartError, match=rf"log.file: cannot write {wrong}"):
            preflight.check(config_with(log={"file": str(wrong)}))
    for right in (tmp_path / "made" / "later" / "all.log", tmp_path / "file", Path("/dev/stderr")):
        assert preflight.check(config_with(log={"file": str(right)})) == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert preflight.check(config_with(log={"file": str(tmp_path)})) == []
