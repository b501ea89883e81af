"""Commands on terminals of another encoding than UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_ends_no_command(encoding: str, tmp_path: Path) -> None:
    """At 40 columns headings are cut, which rich shows by an ellipsis."""
    keys = tmp_path / "keys.yaml"
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "40"}

    def flotilla(*arguments: str) -> str:
        command = [sys.executable, "-m", "deployments.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, check=True).stdout.decode(
            encoding
        )

    flotilla("keys", "create", "mine", "--file", str(keys))
    assert "mine" in flotilla("keys", "list", str(keys))
