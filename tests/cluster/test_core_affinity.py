"""Cores that targets claim and threads keep to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster.core_affinity import claim_core, is_crowded, keep_to, usable_cores
from cluster.step_server import StepServer

CLAIMANT = """
import sys, time
from pathlib import Path
from cluster.core_affinity import claim_core
claim = claim_core({3, 5}, Path(sys.argv[1]))
print(claim.core, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "num_drafters", "expected"),
    [
        (2, 1, 5, True),
        (6, 1, 5, True),
        (7, 1, 5, False),  # a core for everybody
        (64, 1, 5, False),
        (2, 2, 5, False),  # the ranks leave none over
        (1, 1, 5, False),
        (4, 2, 2, True),
        (2, 1, 0, False),  # the scheduler and the target work by turns
        (0, 1, 5, False),  # it cannot be told
    ],
)
def test_where_processes_get_into_each_others_way(
    num_cores: int, num_ranks: int, num_drafters: int, expected: bool
) -> None:
    assert is_crowded(num_cores, num_ranks, num_drafters) is expected


def test_a_core_is_claimed_once_until_it_is_released(tmp_path: Path) -> None:
    folder = tmp_path / "cores"
    first, second = claim_core({3, 5}, folder), claim_core({3, 5}, folder)
    assert first is not None
    assert second is not None
    assert (first.core, second.core) == (3, 5)
    assert claim_core({3, 5}, folder) is None
    first.release()
    third = claim_core({3, 5}, folder)
    assert third is not None
    assert third.core == 3


def test_a_process_that_is_killed_leaves_its_core(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIMANT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "3\n"
        beside = claim_core({3, 5}, tmp_path)
        assert beside is not None
        assert beside.core == 5
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    after = claim_core({3}, tmp_path)
    assert after is not None


def test_who_cannot_tell_claims_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert claim_core({0}, tmp_path / "file") is None
    assert "no core is claimed" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="cores are kept to on Linux only")
def test_only_the_thread_that_answers_calls_keeps_to_cores() -> None:
    here = usable_cores()
    server = StepServer(lambda call: call, b"token", "127.0.0.1")
    try:
        thread = next(one for one in threading.enumerate() if one.name == "step-server")
        assert thread.native_id is not None
        one = {min(here)}
        server.keep_to(one)
        assert os.sched_getaffinity(thread.native_id) == one
        assert usable_cores() == here
        server.keep_to(here)
        assert os.sched_getaffinity(thread.native_id) == here
        server.keep_to({max(here) + 1000})  # there is no such core: it stays where it was
        assert os.sched_getaffinity(thread.native_id) == here
    finally:
        server.close(1.0)


def test_no_cores_named_changes_nothing() -> None:
    here = usable_cores()
    keep_to(())
    assert usable_cores() == here
