"""Which cores threads of a cell keep to."""

from __future__ import annotations

import time

import httpx
import psutil

from cluster.core_affinity import is_crowded, usable_cores
from cluster.placement import rank_name
from tests.own_processes import own_processes
from tests.system.conftest import Server


def kept_cores(pid: int) -> set[frozenset[int]]:
    """Cores that threads of a process keep to, of those threads that do not run on all."""
    threads = psutil.Process(pid).threads()
    return {usable_cores(thread.id) for thread in threads} - {usable_cores()}


def check_kept_cores(server: Server) -> None:
    """Drafters keep off the cores of target and scheduler, where they crowd them."""
    deadline = time.monotonic() + 40
    while True:
        workers = httpx.get(f"{server.url}/debug/workers", timeout=30).json()["data"]
        if all(one["state"] == "ready" for one in workers):
            break
        assert time.monotonic() < deadline, workers
        time.sleep(0.1)
    # EAGLE drafts in the target's own process.
    pids = {one["process"]: one["pid"] for one in workers if "pid" in one}
    (cell,) = own_processes("ServeReplica:flotilla:Cell")
    # Other cells that are tested on this machine may have claimed the cores, and whoever starves is let go.
    claimed = kept_cores(pids.pop(rank_name(0))) | kept_cores(cell)
    print(f"target and scheduler keep to {[sorted(cores) for cores in claimed] or 'any core'}")
    assert [len(cores) for cores in claimed] in ([], [1])
    assert not claimed or is_crowded(len(usable_cores()), 1, len(pids))
    for name, pid in pids.items():
        kept = kept_cores(pid)
        print(f"{name} keeps to {[sorted(cores) for cores in kept] or 'any core'}")
        left_out = {usable_cores() - cores for cores in kept}
        assert left_out <= claimed if claimed else all(len(cores) == 1 for cores in left_out)
