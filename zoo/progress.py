"""Show a training run's progress from its log, whichever process writes it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


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
def watching(out: Path, minutes: dict[str, float]) -> Iterator[None]:
    """Bars for the named models (name -> budget in minutes) while the block runs, read from
    ``out/name/log.jsonl``.
    """
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    stop = threading.Event()
    with Progress(*columns) as progress:
        tasks = {
            name: progress.add_task(name, total=budget * 60.0, note="") for name, budget in minutes.items()
        }

        def poll() -> None:
            while not stop.wait(1.0):
                for name, task in tasks.items():
                    record = last_record(out / name / "log.jsonl")
                    if record:
                        note = f"step {record['step']:.0f}, loss {record['loss']:.3f}"
                        progress.update(task, completed=record["seconds"], note=note)

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
