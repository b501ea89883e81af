"""Progress of a start, as a spinner on a terminal and as lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class Startup:
    """Shows the stages of a start, each with the time it took."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._since = self._begun = time.monotonic()

    @contextmanager
    def running(self) -> Iterator[Startup]:
        """Spin while stages follow each other; the last one is ticked off if all went well."""
        with self._console.status("starting") as status:
            self._update = status.update
            yield self
            self.enter("")

    def enter(self, stage: str) -> None:
        """Tick the current stage off and begin another; entering the same stage again does nothing."""
        if stage == self._stage:
            return
        now = time.monotonic()
        if self._stage:
            self._console.print(f"[green]✓[/] {self._stage} [dim]{now - self._since:.1f} s[/]")
        self._stage, self._since = stage, now
        self._update(f"{stage} ...")

    @property
    def seconds(self) -> float:
        """Since the start began."""
        return time.monotonic() - self._begun
