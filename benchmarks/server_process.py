"""Servers started for a comparison: own process group, log file, readiness, clean end."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# By name, because it ships no types.
psutil: Any = importlib.import_module("psutil")


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server in a process group of its own; use as a context manager.

    Args:
        name: for messages.
        command: how it is started.
        port: where it will listen.
        ready_path: answers 200 once it serves.
        environment: of the process; this one's if None.
        log: file its output goes to.
        cwd: its working directory.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        ready_path: str,
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name, self.port = name, port
        self.url = f"http://127.0.0.1:{port}"
        self._ready_url = self.url + ready_path
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment) if environment is not None else None,
                cwd=cwd,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Return once the server answers; raises RuntimeError with the end of its log if it does not."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self._log_end()}")
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
                urllib.request.urlopen(self._ready_url, timeout=5) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} was not ready after {timeout_s:.0f} s:\n{self._log_end()}")

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def cpu_seconds(self) -> float:
        """Processor time of the whole process tree so far."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def stop(self) -> None:
        """End the server and everything it started."""
        if self._process.poll() is not None:
            # Ended by itself; what it started may live on in its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return
        # Children first taken down: they may have left the group, and orphans would be hard to find.
        children = psutil.Process(self._process.pid).children(recursive=True)
        # Not SIGINT, which what a shell starts in the background hands down as ignored.
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
