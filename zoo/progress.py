"""Show a training run's progress from its log, whichever process writes it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

#: Seconds between two looks at the logs; between two lines on a model where no terminal shows bars.
LOOK_SECONDS, LINE_SECONDS = 1.0, 30.0


def last_record(log: Path) -> dict[str, float]:
    """The newest training record of a ``log.jsonl`` (not of a held-out evaluation); empty where there is
    none.
    """
    if not log.exists():
        return {}
    for line in reversed(log.read_text(encoding="utf-8").splitlines()):
        record: dict[str, float] = json.loads(line)
        if "loss" in record:
            return record
    return {}


@contextmanager
def stage(console: Console, title: str) -> Iterator[None]:
    """Spin while the block runs; where there is no terminal, a line says that it has begun."""
    if not console.is_terminal:
        console.print(f"{title} ...", markup=False, highlight=False, soft_wrap=True)
    with console.status(title):
        yield


@contextmanager
def watching(console: Console, out: Path, minutes: dict[str, float]) -> Iterator[None]:
    """Bars for the named models (name -> budget in minutes) while the block runs, read from
    ``out/name/log.jsonl``; lines in their place where there is no terminal.
    """
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    stop = threading.Event()
    logs = {name: out / name / "log.jsonl" for name in minutes}
    # What an earlier run has left says nothing of this one.
    seen = {name: _written_at(log) for name, log in logs.items()}
    told = dict.fromkeys(minutes, time.monotonic())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {
            name: progress.add_task(name, total=budget * 60.0, note="") for name, budget in minutes.items()
        }

        def look() -> None:
            for name, log in logs.items():
                at = _written_at(log)
                record = last_record(log) if at != seen[name] else {}
                if not record:
                    continue
                seen[name] = at
                note = f"step {record['step']:.0f}, loss {record['loss']:.3f}"
                progress.update(tasks[name], completed=record["seconds"], note=note)
                if not console.is_terminal and time.monotonic() - told[name] >= LINE_SECONDS:
                    told[name] = time.monotonic()
                    console.print(
                        f"{name}: {note}, {record['seconds']:.0f} of {minutes[name] * 60.0:.0f} s",
                        markup=False,
                        highlight=False,
                        soft_wrap=True,
                    )

        def poll() -> None:
            while not stop.wait(LOOK_SECONDS):
                look()

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _written_at(log: Path) -> int:
    """When it was last written, in nanoseconds; 0 where there is none."""
    return log.stat().st_mtime_ns if log.exists() else 0
