"""What a killed run of `flotilla zoo` leaves: no half of a model or file, no process that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.zoo.test_pair import TINY, TOKENIZER
from zoo import models, scored, workers

BEGIN = "import sys; from tests.zoo import test_killed_runs; test_killed_runs.begin(sys.argv[1])"


def test_a_model_is_there_when_all_of_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    model = models.build("tiny", TOKENIZER)

    def killed(self: PreTrainedTokenizerFast, folder: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            models.export(model, TOKENIZER, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    for _ in range(2):  # the second time in place of the first
        models.export(model, TOKENIZER, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_a_half_of_a_file_is_not_read_with_the_others(tmp_path: Path) -> None:
    scored.unfinished(tmp_path / "generated-1.npz").write_bytes(b"PK")
    assert not list(tmp_path.glob("generated-*.npz"))


def begin(file: str) -> None:
    """A run of one process, which `wait` is, as a script has it that began it in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    workers.run(wait, (file,), 1)


def wait(number: int, file: str) -> None:
    """Say who waits, then wait for longer than anybody does."""
    Path(f"{file}.new").write_text(str(os.getpid()))
    Path(f"{file}.new").rename(file)
    time.sleep(600.0)


def test_no_process_outlives_the_run(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    run = subprocess.Popen([sys.executable, "-c", BEGIN, str(file)])
    try:
        _until(file.exists)
        worker = Path("/proc") / file.read_text()
    finally:
        run.kill()
        run.wait()
    _until(lambda: not worker.exists() or "\nState:\tZ" in (worker / "status").read_text())


def _until(is_so: Callable[[], bool]) -> None:
    for _ in range(600):
        if is_so():
            return
        time.sleep(0.2)
    pytest.fail("nothing came of waiting for two minutes")
