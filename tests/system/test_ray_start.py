"""A Ray whose first start fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tests.conftest import ROOT
from tests.system.conftest import free_port

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("own_ray")]


def _killed_gcs(server: int, seen: set[int]) -> bool:
    """The server's Ray has lost a GCS that had not been seen before."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(server).children(recursive=True):
            if process.pid not in seen and process.name() == "gcs_server":
                seen.add(process.pid)
                process.kill()
                return True
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("kills", [1, 2])
def test_a_ray_that_does_not_start_is_started_once_more(kills: int) -> None:
    """Seen once in many starts: its GCS was not there within half a minute, and that of the next was."""
    server = subprocess.Popen(
        [sys.executable, "-m", "deployments.cli", "serve", "--port", str(free_port())],
        cwd=ROOT,
        env=os.environ | {"RAY_gcs_server_port_wait_time_s": "2"},
        stderr=subprocess.PIPE,
        text=True,
    )
    seen: set[int] = set()
    deadline = time.monotonic() + 120
    while len(seen) < kills:
        assert time.monotonic() < deadline
        _killed_gcs(server.pid, seen)
        time.sleep(0.002)
    if kills == 2:
        _, told = server.communicate(timeout=120)
        assert server.returncode == 2
        assert "Ray did not start in 2 attempts: " in told
        assert "Traceback" not in told
        return
    assert server.stderr is not None
    told = ""
    while "ready after" not in told:
        assert time.monotonic() < deadline
        told += server.stderr.readline()
    assert "warning: Ray did not start, and is started once more: " in told
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=60)
    assert server.returncode == 0
