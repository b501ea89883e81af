"""Another configuration for a system under load: no request fails, and no text differs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx
import pytest

from cluster.config import FlotillaConfig
from cluster.members import REPORT_INTERVAL_S
from deployments.rollout import RolloutError, begin
from tests.system.conftest import Server


def check_a_rollout(server: Server, ask: Callable[[], object], expected: object) -> None:
    """From two cells to one with another policy, while `ask` is repeated."""
    stop = threading.Event()
    answers: list[object] = []

    def load() -> None:
        while not stop.is_set():
            try:
                answers.append(ask())
            except BaseException as error:
                answers.append(error)
                return
            stop.wait(0.3)  # else the load takes longer than what it is to disturb

    raw = server.config.model_dump()
    raw["policy"]["name"] = "smartspec"
    raw["scaling"]["cells"] |= {"min": 1, "max": 1}
    with pytest.raises(RolloutError, match=r"target\.path"):
        next(begin(FlotillaConfig.model_validate(raw | {"target": {"path": "zoo:another"}})))
    loader = threading.Thread(target=load)
    loader.start()
    without_cell_since, longest_s = None, 0.0
    try:
        for progress in begin(FlotillaConfig.model_validate(raw)):
            assert not progress.has_failed, progress
            if any((one.kind, one.state) == ("cell", "ready") for one in progress.members):
                without_cell_since = None
            elif progress.members:  # else the directory is being replaced
                without_cell_since = without_cell_since or time.monotonic()
                longest_s = max(longest_s, time.monotonic() - without_cell_since)
    finally:
        stop.set()
        loader.join(timeout=120)
    assert progress.is_done
    assert answers
    assert all(answer == expected for answer in answers), answers
    # A new directory has soon heard of everybody; a cell takes many seconds to load its models.
    assert longest_s < 8 * REPORT_INTERVAL_S, "there was a time without a cell"
    deadline = time.monotonic() + 20
    while httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["policy"] != "smartspec":
        assert time.monotonic() < deadline, "front ends still tell of a former cell"
        time.sleep(0.2)
