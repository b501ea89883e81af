"""Cores that targets claim and threads keep to."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import core_affinity
from cluster.core_affinity import LET_GO_S, KeptThread, claim_core, is_crowded, keep_to, usable_cores
from cluster.step_server import StepServer

CLAIMANT = """
import sys, time
from pathlib import Path
from cluster.core_affinity import claim_core
claim = claim_core({3, 5, 7}, Path(sys.argv[1]))
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
    first, second = claim_core({3, 5, 7}, folder), claim_core({3, 5, 7}, folder)
    assert first is not None
    assert second is not None
    assert (first.core, second.core) == (3, 5)
    assert claim_core({3, 5, 7}, folder) is None  # the last one is for drafters
    first.release()
    third = claim_core({3, 5, 7}, folder)
    assert third is not None
    assert third.core == 3


def test_a_process_that_is_killed_leaves_its_core(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIMANT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "3\n"
        beside = claim_core({3, 5, 7}, tmp_path)
        assert beside is not None
        assert beside.core == 5
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    after = claim_core({3, 7}, tmp_path)
    assert after is not None


def test_who_cannot_tell_claims_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert claim_core({0, 1}, tmp_path / "file") is None
    assert "no core is claimed" in caplog.text


def test_only_the_thread_that_answers_calls_keeps_to_cores() -> None:
    here = usable_cores()
    server = StepServer(lambda call: call, b"token", "127.0.0.1", heartbeat_s=0.5)
    try:
        thread = next(one for one in threading.enumerate() if one.name == "step-server")
        assert thread.native_id is not None
        one = set(sorted(here)[:1])  # none where cores cannot be chosen, as everywhere below
        server.keep_to(one)
        assert usable_cores(thread.native_id) == one
        assert usable_cores() == here
        server.keep_to(here)
        assert usable_cores(thread.native_id) == here
        server.keep_to({core + 1000 for core in here})  # there are no such cores: it stays where it was
        assert usable_cores(thread.native_id) == here
    finally:
        server.close(1.0)


HOG = """
import sys
from cluster.core_affinity import keep_to
keep_to(set(map(int, sys.argv[1:])))
while True:
    pass
"""

STARVED = """
import os, sys, threading, time
from cluster.core_affinity import KeptThread, usable_cores
os.nice(19)
cores = frozenset(map(int, sys.argv[1:]))
kept = KeptThread(threading.get_native_id(), cores, usable_cores())
assert usable_cores() == cores
print("kept", flush=True)
until = time.monotonic() + 30
while kept.is_kept and time.monotonic() < until:
    sum(range(1000))
    kept.look(time.monotonic())
print(len(usable_cores()), flush=True)
"""


def test_a_thread_that_starves_on_its_core_is_let_go() -> None:
    cores = [str(core) for core in sorted(usable_cores())[:1]]
    hog = subprocess.Popen([sys.executable, "-c", HOG, *cores])
    try:
        starved = subprocess.run(
            [sys.executable, "-c", STARVED, *cores], capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        hog.kill()
        hog.wait()
    assert starved.stdout.split() == ["kept", str(len(usable_cores()))]


def test_who_has_enough_of_its_core_stays_and_who_was_let_go_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = waited = 0.0
    kept_to: list[set[int]] = []
    monkeypatch.setattr(core_affinity, "scheduled", lambda thread: (ran, waited))
    monkeypatch.setattr(core_affinity, "keep_to", lambda cores, thread: kept_to.append(set(cores)))
    thread = KeptThread(1, {0}, {0, 1})
    now = time.monotonic() + 1.0
    thread.look(now)
    for _ in range(10):  # four that share a core
        ran, waited, now = ran + 0.25, waited + 0.75, now + 1.0
        thread.look(now)
    for _ in range(10):  # idle, on a machine where somebody else has much to do
        ran, waited, now = ran + 0.001, waited + 0.15, now + 1.0
        thread.look(now)
    assert thread.is_kept
    waited, now = waited + 0.95, now + 1.0
    thread.look(now)
    assert not thread.is_kept
    thread.look(now + LET_GO_S - 1)
    assert not thread.is_kept
    now += LET_GO_S
    thread.look(now)
    assert thread.is_kept
    ran, now = ran + 1.0, now + 1.0
    thread.look(now)
    assert thread.is_kept
    assert kept_to == [{0}, {0, 1}, {0}]


class Machine:
    """What the system tells of a thread, and is told; times as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.ran = self.waited = 0.0
        self.can_tell = True
        self.kept_to: list[set[int]] = []
        monkeypatch.setattr(core_affinity, "scheduled", lambda thread: self.times())
        monkeypatch.setattr(core_affinity, "keep_to", lambda cores, thread: self.kept_to.append(set(cores)))
        monkeypatch.setattr(core_affinity, "time", SimpleNamespace(monotonic=lambda: self.now))

    def times(self) -> tuple[float, float] | None:
        return (self.ran, self.waited) if self.can_tell else None

    def passes(self, seconds: float, *, ran: float = 0.0, waited: float = 0.0) -> None:
        self.now += seconds
        self.ran += ran * seconds
        self.waited += waited * seconds


def test_who_may_leave_its_cores_is_called_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    thread = KeptThread(1, {0}, {0, 1})
    thread.free(True)
    thread.free(True)
    assert not thread.is_kept
    machine.passes(5.0, waited=1.0)
    thread.look(machine.now)
    thread.free(False)
    assert thread.is_kept
    machine.passes(1.0)
    thread.look(machine.now)  # what it waited for while it was free says nothing of its own core
    assert machine.kept_to == [{0}, {0, 1}, {0}]
    # One that starved on its core stays away from it for a while, whoever calls.
    machine.passes(2.0, waited=0.5)
    thread.look(machine.now)
    for is_free in (True, False, True):
        thread.free(is_free)
    assert machine.kept_to == [{0}, {0, 1}, {0}, {0, 1}]
    machine.passes(LET_GO_S)
    thread.look(machine.now)
    assert machine.kept_to == [{0}, {0, 1}, {0}, {0, 1}]
    thread.free(False)
    assert thread.is_kept
    assert machine.kept_to == [{0}, {0, 1}, {0}, {0, 1}, {0}]


@pytest.mark.parametrize("each_s", [0.05, 0.2, 0.45])
@pytest.mark.parametrize(("ran", "lets_go"), [(0.03, True), (0.3, False)])
def test_who_starves_whenever_it_is_kept_is_let_go(
    each_s: float, ran: float, lets_go: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts and without take turns, and it is watched once a second at whatever moment."""
    machine = Machine(monkeypatch)
    thread, looked_at = KeptThread(1, {0}, {0, 1}), 0.0
    for _ in range(round(6.0 / each_s)):
        thread.free(False)
        machine.passes(each_s, ran=ran, waited=1.0 - ran)
        if machine.now >= looked_at + 1.0:
            thread.look(machine.now)
            looked_at = machine.now
        thread.free(True)
        machine.passes(each_s, ran=0.9)
    thread.free(False)
    assert thread.is_kept is not lets_go


def test_who_cannot_be_watched_is_not_called_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    thread = KeptThread(1, {0}, {0, 1})
    machine.can_tell = False
    thread.free(True)
    assert machine.kept_to == [{0}, {0, 1}]
    thread.free(False)
    assert not thread.is_kept
    assert machine.kept_to == [{0}, {0, 1}]
    machine.can_tell = True
    thread.free(False)
    assert thread.is_kept
    assert machine.kept_to == [{0}, {0, 1}, {0}]


def test_who_may_run_anywhere_is_left_as_others_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    thread = KeptThread(1, {0, 1}, {0, 1})
    for is_free in (True, False, True):
        thread.free(is_free)
    assert machine.kept_to == [{0, 1}]


def test_no_cores_named_changes_nothing() -> None:
    here = usable_cores()
    keep_to(())
    assert usable_cores() == here
