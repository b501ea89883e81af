"""A server goes on when nobody reads its output: it ended, and left on a cluster what it ran there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from deployments.lasting_output import lasting_output
from tests.conftest import ROOT

SERVER = """
import sys
from pathlib import Path
from rich.console import Console
from deployments.lasting_output import lasting_output

with lasting_output():
    console = Console(stderr=True)
    for number in range(3):
        print(f"line {number}", flush=True)
        console.print("ready")
        print("not flushed")
    Path(sys.argv[1]).write_text("went on")
"""


@contextmanager
def broken_pipe() -> Iterator[int]:
    """One whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def full_disk() -> Iterator[int]:
    file = os.open("/dev/full", os.O_WRONLY)
    yield file
    os.close(file)


@pytest.mark.parametrize("output", [broken_pipe, full_disk])
@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_a_server_goes_on_when_its_output_is_not_taken(
    output: Callable[[], AbstractContextManager[int]], closed: str, tmp_path: Path
) -> None:
    file = tmp_path / "ended"
    with output() as lost:
        ran = subprocess.run(
            [sys.executable, "-c", SERVER, str(file)],
            cwd=ROOT,
            stdout=subprocess.PIPE if closed == "stderr" else lost,
            stderr=subprocess.PIPE if closed == "stdout" else lost,
            text=True,
            check=False,
        )
    assert file.read_text() == "went on"
    assert ran.returncode == 0
    assert ran.stderr in ("ready\n" * 3, None), "the interpreter complains"
    assert ran.stdout in ("".join(f"line {number}\nnot flushed\n" for number in range(3)), None)


def test_afterwards_all_is_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with lasting_output():
        print("out")
        print("err", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    print("more")
    assert capfd.readouterr() == ("out\nmore\n", "err\n")
