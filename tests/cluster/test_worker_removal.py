"""How processes of workers are ended: of those that are removed, and of those that may be stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import worker as workers
from cluster.worker import Worker
from cluster.worker_set import WorkerSet
from deployments.demo import demo_config


class _Connection:
    """Of a process that lives."""

    is_lost = False

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("is_removed", [True, False])
def test_only_who_may_be_stopped_is_killed_past_ray(
    is_removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray took a drafter that was removed for one that died of too little memory, and said so at length."""
    killed: list[tuple[int, int]] = []
    ended: list[Any] = []
    monkeypatch.setattr(workers, "this_node", lambda: "here")
    monkeypatch.setattr(workers, "end", ended.append)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    nobody: Any = SimpleNamespace(group_options=dict)
    pool = WorkerSet(demo_config(), b"token", nobody, nobody)
    connection: Any = _Connection()
    pool.workers["small"] = Worker("small", ["actor"], [connection], [("here", 1234)], is_loaded=True)
    asyncio.run(pool.remove("small") if is_removed else pool.stop("small"))
    assert ended == ["actor"]
    assert killed == ([] if is_removed else [(1234, signal.SIGKILL)])
    assert pool.workers == {}
