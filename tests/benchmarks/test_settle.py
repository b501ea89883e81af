"""Servers side by side: the next is asked once the others have come to rest. With real processes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import vllm_peer
from benchmarks.server_process import ServerProcess

# As a server that looks for messages without a pause; here until a file is there.
_BUSY = "import os, time\nwhile not os.path.exists('rest'): pass\ntime.sleep(600)"


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[ServerProcess]:
    command = [sys.executable, "-c", _BUSY]
    with ServerProcess("busy", command, 0, "/", log=tmp_path / "log", cwd=tmp_path) as server:
        while server.cpu_seconds() < 0.2:  # it has begun
            time.sleep(0.02)
        yield server


def test_nobody_is_asked_while_another_is_still_busy(busy: ServerProcess, tmp_path: Path) -> None:
    rest = tmp_path / "rest"
    timer = threading.Timer(1.0, rest.touch)
    timer.start()
    vllm_peer.settle([busy], {"busy": 0.0})
    assert rest.exists()
    timer.join()


def test_who_never_rests_ends_the_comparison_with_its_name(
    busy: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_peer, "_SETTLE_WITHIN_S", 0.5)
    with pytest.raises(RuntimeError, match="busy: still busy"):
        vllm_peer.settle([busy], {"busy": 0.0})
