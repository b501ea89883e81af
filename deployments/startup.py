"""Progress of a start, as a spinner on a terminal and as lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

#: Where no spinner shows what is going on, a stage that takes longer than this is named once. Seconds.
_LONG_S = 10.0


class Startup:
    """Shows the stages of a start, each with the time it took."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._is_told = False
        self._since = self._begun = time.monotonic()

    @contextmanager
    def running(self) -> Iterator[Startup]:
        """Spin while stages follow each other; the last one is ticked off if all went well."""
        with self._console.status("starting") as status:
            self._update = status.update
            yield self
            self.enter("")

    def enter(self, stage: str) -> None:
        """Tick the current stage off and begin another; the same stage again is told only if it is long."""
        now = time.monotonic()
        if stage == self._stage:
            if now - self._since > _LONG_S and not self._is_told and not self._console.is_terminal:
                self._is_told = True
                self._console.print(f"  {stage} ...", markup=False, highlight=False, soft_wrap=True)
            return
        if self._stage:
            self._console.print(f"[green]✓[/] {self._stage} [dim]{now - self._since:.1f} s[/]")
        self._stage, self._since, self._is_told = stage, now, False
        self._update(f"{stage} ...")

    @property
    def seconds(self) -> float:
        """Since the start began."""
        return time.monotonic() - self._begun
