"""Progress of a comparison: which run it is, and the time left, from the seconds each run should take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.load_client import Outcome
from benchmarks.tables import console


class CompareProgress:
    """One bar over all runs; use as a context manager. Outside a terminal it prints a line per run."""

    def __init__(self) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            transient=True,
            # Progress of seconds long gone says little: runs at other rates take other times.
            speed_estimate_period=600.0,
        )
        self._task: TaskID | None = None
        self._weights: list[float] = []
        self._num_done = 0
        self._earlier = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Callable[[Outcome], None]]:
        """Something before the runs; yields what to call with each outcome."""
        task = self._bar.add_task(title, total=total, count="")
        yield lambda outcome: self._bar.advance(task)
        self._bar.remove_task(task)

    def start(self, weights: Sequence[float], earlier: int) -> None:
        """The runs begin: seconds each should take, and how many were finished earlier."""
        self._weights, self._earlier = list(weights), earlier
        self._task = self._bar.add_task("", total=sum(weights), count="")

    @contextmanager
    def run(self, title: str, num_requests: int) -> Iterator[Callable[[Outcome], None]]:
        """The next run; yields what to call with each outcome."""
        assert self._task is not None, "start first"
        task, weight = self._task, self._weights[self._num_done]
        place = f"run {self._earlier + self._num_done + 1} of {self._earlier + len(self._weights)}"
        self._bar.update(task, description=title, count=place)
        if not console.is_terminal:
            console.print(f"{place}: {title}", highlight=False)
        yield lambda outcome: self._bar.advance(task, weight / num_requests)
        self._num_done += 1
