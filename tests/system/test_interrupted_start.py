"""A start that is interrupted while Ray begins."""

from __future__ import annotations

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


@pytest.mark.thorough
def test_a_signal_while_ray_begins_leaves_no_process() -> None:
    """Ray's agents, which their raylet starts, know of nobody else who could end them."""
    server = subprocess.Popen(
        [sys.executable, "-m", "deployments.cli", "serve", "--port", str(free_port())],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen: dict[int, psutil.Process] = {}
    names = set[str]()
    deadline = time.monotonic() + 60
    while "raylet" not in names:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        for process in psutil.Process(server.pid).children(recursive=True):
            seen[process.pid] = process
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                names.add(process.name())
    time.sleep(0.7)  # agents are begun, and Ray is not ready yet
    seen |= {process.pid: process for process in psutil.Process(server.pid).children(recursive=True)}
    server.send_signal(signal.SIGTERM)
    _, told = server.communicate(timeout=60)
    assert server.returncode == 0, told
    assert told.rstrip().endswith("stopping ...")
    _, left = psutil.wait_procs(seen.values(), timeout=10)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
