"""Where lines go, what they look like there, and which of them the console shows."""

from __future__ import annotations

import builtins
import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from ray.serve._private.logging_utils import StreamToLogger, redirected_print
from rich.console import Console

from cluster import log_files
from cluster.log_files import log_to_files, shown_logs
from cluster.logs import PACKAGES, configure_logs
from cluster.mirrored_log import IS_SHOWN, MirrorHandler, ShownLog
from cluster.observability_config import LogConfig

log = logging.getLogger("deployments.test")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Our loggers, as they were."""
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for handler in loggers[0].handlers:
        handler.close()
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.level, logger.propagate = handlers, level, propagate


@pytest.fixture
def in_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """`print` and `sys.stderr` as Ray Serve leaves them to replicas."""
    monkeypatch.setattr(builtins, "print", redirected_print)
    monkeypatch.setattr(
        sys, "stderr", StreamToLogger(logging.getLogger("ray.serve"), logging.INFO, sys.stderr)
    )


@pytest.fixture
def session(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A session of Ray's; paths of sockets must be short."""
    directory = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(log_files, "session_directory", lambda: directory)
    return directory


def fail() -> None:
    try:
        {}["missing"]
    except KeyError:
        log.exception("request %s failed", "r-1")


@pytest.mark.usefixtures("in_a_replica")
def test_every_line_of_a_replica_s_file_is_json_and_a_traceback_is_text(session: Path) -> None:
    """Ray Serve's prefix stood before each of them, and its `print` made tuples of tracebacks."""
    log_to_files(LogConfig(format="json"), {"cell": "c", "worker": "verifier rank/0"})
    log.info("two\nlines")
    fail()
    (file,) = (session / "logs" / "flotilla").iterdir()
    assert file.name == "cell-c-worker-verifier-rank-0.log"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "two\nlines"),
        ("error", "request r-1 failed"),
    ]
    traceback = lines[1]["exception"].splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "KeyError: 'missing'"
    assert "('" not in lines[1]["exception"]


@pytest.mark.usefixtures("in_a_replica")
def test_without_a_session_lines_go_to_the_process_s_own_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", written)
    configure_logs(LogConfig(), {"cell": "c"})
    fail()
    lines = written.getvalue().splitlines()
    assert lines[0].endswith("error deployments.test: request r-1 failed cell=c")
    assert (lines[1], lines[-1]) == ("Traceback (most recent call last):", "KeyError: 'missing'")


def test_a_file_that_is_named_takes_the_lines(session: Path, tmp_path: Path) -> None:
    config = LogConfig(file=tmp_path / "all.log")
    log_to_files(config, {"cell": "c"})
    log.info("here")
    assert "here" in (tmp_path / "all.log").read_text()
    assert not (session / "logs").exists()
    assert shown_logs(config) == str(tmp_path / "all.log")
    assert shown_logs(LogConfig()) == f"{session}/logs/flotilla/*.log"


def test_a_file_may_be_the_output_of_another_process() -> None:
    """As `/proc/1/fd/1`, what `kubectl logs` and `docker logs` show."""
    reads, writes = os.pipe()
    configure_logs(LogConfig(format="json", file=Path(f"/proc/{os.getpid()}/fd/{writes}")), {"cell": "c"})
    log.info("one")
    log.info("two")
    lines = os.read(reads, 10_000).decode().splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["one", "two"]
    os.close(reads)
    os.close(writes)


def shown(console: Console, until: str) -> str:
    text = ""
    for _ in range(200):
        text += console.export_text()
        if until in text:
            return text
        time.sleep(0.02)
    raise AssertionError(f"{until!r} is not shown: {text}")


def test_the_console_shows_warnings_and_errors_alone(session: Path) -> None:
    console = Console(record=True, width=60, file=io.StringIO())
    log_to_files(LogConfig(format="json"), {"front_end": "fe1"})
    log.error("nobody listens yet")
    shower = ShownLog(console, session, "the files")
    log.info("a request")
    log.warning("told before", extra=IS_SHOWN)
    log.warning("first\nthing [/red]")
    log.error("lost", exc_info=RuntimeError("Traceback:\n  of another process\nOSError: \x1b[2Jgone"))
    for _ in range(3):
        fail()
    text = shown(console, "failed")
    time.sleep(0.1)
    shower.close()
    log.error("after the end")
    lines = [line.partition(" ")[2] for line in (text + console.export_text()).splitlines()]
    assert lines == [
        "warning: first thing [/red] [front_end fe1]",
        "error: lost (OSError: [2Jgone) [front_end fe1]",
        "error: request r-1 failed (KeyError: 'missing') [front_end fe1]",
    ]


@pytest.mark.parametrize("format", ["json", "text"])
def test_half_a_character_does_not_cost_the_line(format: Literal["json", "text"], tmp_path: Path) -> None:
    """As a client's JSON may have it, and then the error that it sets off: nothing was told of that."""
    file = tmp_path / "log"
    configure_logs(LogConfig(format=format, file=file), {"cell": "c"})
    log.warning("before %s", json.loads('"\\ud800"'))
    try:
        raise KeyError(json.loads('"\\udc80"') + "x")
    except KeyError:
        log.exception("request %s failed", "r-1")
    told = file.read_text()
    for part in ("before", "ud800", "request r-1 failed", "KeyError", "udc80"):
        assert part in told
    if format == "json":
        assert len([json.loads(line) for line in told.splitlines()]) == 2


def test_a_flood_is_counted_and_not_shown(session: Path) -> None:
    now = 0.0
    console = Console(record=True, width=60, file=io.StringIO())
    shower = ShownLog(console, session, "the files", clock=lambda: now)
    log_to_files(LogConfig(), {"cell": "c"})
    for number in range(10):
        log.error("error %d", number)
    shown(console, "error 9")
    for number in range(3):
        log.error("again %d", number)
    time.sleep(0.2)
    now = 60.0
    log.error("much later")
    lines = [line.partition(" ")[2] for line in shown(console, "much later").splitlines()]
    assert lines == ["3 more warnings and errors are in the files", "error: much later [cell c]"]
    shower.close()


def test_who_logs_does_not_wait_for_a_console_that_stands_still(session: Path) -> None:
    class Stuck(io.StringIO):
        def write(self, _: str) -> int:
            time.sleep(30.0)
            return 0

    shower = ShownLog(Console(file=Stuck()), session, "the files")
    record = logging.makeLogRecord({"msg": "x" * 400, "levelno": logging.ERROR, "levelname": "ERROR"})
    handler = MirrorHandler(session, {"cell": "c"})
    sending = threading.Thread(target=lambda: [handler.handle(record) for _ in range(2000)], daemon=True)
    sending.start()
    sending.join(timeout=10.0)
    assert not sending.is_alive()
    handler.close()
    del shower  # its thread ends with the process
