"""Servers started for a comparison: nothing of them is left."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.live_system import psutil
from benchmarks.server_process import ServerProcess


def test_what_a_server_that_ended_by_itself_has_started_is_ended_too(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    command = ["sh", "-c", f'sleep 600 & echo $! >"{told}"; exit 3']
    with ServerProcess("it", command, 1, "/ready", log=tmp_path / "log") as server:
        server._process.wait(10)
        pid = int(told.read_text())
        assert psutil.pid_exists(pid)
    deadline = time.monotonic() + 5.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.01)
