"""`flotilla keys create` and the file that it changes: whose it is, who else changes it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster.security_config import KeysFile
from deployments import keys_command

CREATE = [sys.executable, "-m", "deployments.cli", "keys", "create"]


def names(file: Path) -> set[str]:
    return {key.name for key in KeysFile.load(file).keys}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    subprocess.run([*CREATE, "first", "--file", path], check=True, capture_output=True)
    return path


def test_a_key_that_nobody_could_read_is_not_kept(file: Path) -> None:
    read, write = os.pipe()
    os.close(read)  # as of `| true`
    with os.fdopen(write, "w") as closed:
        ended = subprocess.run([*CREATE, "second", "--file", file], stdout=closed, check=False)
    assert ended.returncode != 0
    assert names(file) == {"first"}
    assert os.listdir(file.parent) == [file.name]


def test_nor_is_one_for_which_there_is_no_space(file: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*CREATE, "second", "--file", file], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (2, "flotilla: cannot write: No space left on device\n")
    assert names(file) == {"first"}


def test_commands_at_the_same_time_keep_each_others_keys(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = keys_command._added

    def slowly(file: Path | None, entry: dict[str, Any]) -> str:
        text = added(file, entry)
        time.sleep(0.1)
        return text

    def create(name: str) -> None:
        keys_command.create(
            name,
            file,
            permission=None,
            tier=None,
            model=None,
            requests_per_minute=None,
            tokens_per_minute=None,
            max_concurrent=None,
        )

    monkeypatch.setattr(keys_command, "_added", slowly)
    with ThreadPoolExecutor(4) as commands:
        list(commands.map(create, "abcd"))
    assert names(file) == {"first", *"abcd"}


def test_a_file_stays_its_owners_and_a_link_a_link(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(file.name)
    file.chmod(0o660)
    if os.geteuid() == 0:
        os.chown(file, 1234, 1235)
    before = file.stat()
    subprocess.run([*CREATE, "second", "--file", link], check=True, capture_output=True)
    assert link.is_symlink()
    assert names(file) == {"first", "second"}
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
