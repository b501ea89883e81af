"""Only descendants of a test are its own, however alike others are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.own_processes import own_processes

KIND = f"ray::ServeReplica:of-test-{os.getpid()}"
SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)", KIND]
STARTS = (
    "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid, flush=True)"
)


@contextmanager
def of_others() -> Iterator[int]:
    """A process whose parent has ended: as anybody else's, it does not descend from this one."""
    started = subprocess.run([sys.executable, "-c", STARTS, *SLEEPS], stdout=subprocess.PIPE, check=True)
    pid = int(started.stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def test_processes_of_others_are_not_found() -> None:
    grandparent = subprocess.Popen(
        [sys.executable, "-c", f"{STARTS}; import time; time.sleep(60)", *SLEEPS], stdout=subprocess.PIPE
    )
    assert grandparent.stdout is not None
    own = int(grandparent.stdout.readline())
    try:
        with of_others() as other:
            while not all(KIND in " ".join(psutil.Process(pid).cmdline()) for pid in (own, other)):
                time.sleep(0.01)
            assert own_processes(KIND) == [grandparent.pid, own]
            assert own_processes("nothing of the kind") == []
    finally:
        os.kill(own, signal.SIGKILL)
        grandparent.kill()
        grandparent.communicate()
    assert own_processes(KIND) == []
