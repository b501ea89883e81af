"""What SIGHUP means to a server: another configuration, or that its terminal was closed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import ROOT

# Its terminal is the one that it opens first, as of every process that begins a session.
SERVER = """
import os, signal, sys, time
if sys.argv[1] != "none":
    os.open(sys.argv[1], os.O_RDWR)
if sys.argv[2] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
from deployments.hangups import Hangups

def stop(*_):
    print("stopped", flush=True)
    sys.exit()

hangups = Hangups()
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    time.sleep(0.05)
    if hangups.number:
        hangups.number = 0
        print("asked", flush=True)
"""

Start = Callable[[str, str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Start:
    def started(terminal: str, under: str) -> subprocess.Popen[str]:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, terminal, under],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert told(server) == "ready"
        return server

    return started


def told(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline().strip()


def end(server: subprocess.Popen[str]) -> None:
    server.send_signal(signal.SIGTERM)
    assert server.communicate(timeout=20)[0] == "stopped\n"


def test_a_service_is_asked_for_its_configuration(start: Start) -> None:
    server = start("none", "")
    for _ in range(2):
        server.send_signal(signal.SIGHUP)
        assert told(server) == "asked"
    end(server)


@pytest.mark.parametrize("under", ["", "nohup"])
def test_a_server_in_a_terminal_is_asked_too(start: Start, under: str) -> None:
    ours, its = pty.openpty()
    server = start(os.ttyname(its), under)
    server.send_signal(signal.SIGHUP)
    assert told(server) == "asked"
    end(server)
    os.close(ours)
    os.close(its)


def test_a_server_stops_with_its_terminal(start: Start) -> None:
    """It began to roll out its configuration, and ended as it could not say so."""
    ours, its = pty.openpty()
    server = start(os.ttyname(its), "")
    os.close(its)
    os.close(ours)
    assert server.communicate(timeout=20)[0] == "stopped\n"


def test_under_nohup_it_outlives_its_terminal(start: Start) -> None:
    ours, its = pty.openpty()
    server = start(os.ttyname(its), "nohup")
    os.close(its)
    os.close(ours)
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(timeout=1.0)
    server.send_signal(signal.SIGHUP)
    assert told(server) == "asked", "the terminal's own was taken for a wish, or this was not"
    end(server)
