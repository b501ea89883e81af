"""Progress of a training, where no terminal shows bars: lines, of this run alone."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from zoo import progress


def record(folder: Path, step: int, loss: float) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "seconds": 3 * step, "loss": loss}) + "\n")


def test_a_file_gets_lines_of_what_is_trained_and_none_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    record(tmp_path / "earlier", 900, 0.5)
    record(tmp_path / "both", 800, 0.25)
    console = Console(file=io.StringIO())
    assert isinstance(console.file, io.StringIO)
    with progress.stage(console, "reading the corpus"):
        assert console.file.getvalue() == "reading the corpus ...\n"
    with progress.watching(console, tmp_path, {"earlier": 10.0, "both": 2.0, "none": 1.0}):
        record(tmp_path / "both", 5, 3.5)
        for _ in range(1000):
            if "both" in console.file.getvalue():
                break
            time.sleep(0.01)
    assert console.file.getvalue().splitlines() == [
        "reading the corpus ...",
        "both: step 5, loss 3.500, 15 of 120 s",
    ]
