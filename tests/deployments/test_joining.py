"""Joining a Ray cluster that somebody else started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from deployments import joining

_ROOT = Path(__file__).resolve().parents[2]


def test_serve_says_at_once_that_no_ray_answers() -> None:
    """Ray tried again for two minutes, and what it raised then was a traceback."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        run = subprocess.run(
            [sys.executable, "-m", "deployments.cli", "serve", "--port", "0"],
            env=os.environ | {"RAY_ADDRESS": address},
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert run.returncode == 2
    assert f"RAY_ADDRESS is '{address}', and there is no Ray cluster to connect to" in run.stderr
    assert "Connection refused" in run.stderr
    assert "Traceback" not in run.stderr


def test_who_is_not_let_in_is_told_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray start` asks for one where it finds one, and Ray says only that it failed to connect."""

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(joining, "_look_for", lambda _: None)
    with pytest.raises(ConnectionError, match=r"Failed to connect to Ray cluster.*RAY_AUTH_MODE=token"):
        joining.join("10.0.0.1:6379")
