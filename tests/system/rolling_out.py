"""Another configuration for a system under load: no request fails, and no text differs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx
import pytest

from cluster.config import FlotillaConfig
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

    raw = server.config.model_dump()
    raw["policy"]["name"] = "smartspec"
    raw["scaling"]["cells"] |= {"min": 1, "max": 1}
    with pytest.raises(RolloutError, match=r"target\.path"):
        next(begin(FlotillaConfig.model_validate(raw | {"target": {"path": "zoo:another"}})))
    loader = threading.Thread(target=load)
    loader.start()
    num_ready = []
    try:
        for progress in begin(FlotillaConfig.model_validate(raw)):
            assert not progress.has_failed, progress
            if progress.members:  # else the directory is being replaced
                found = [one for one in progress.members if (one.kind, one.state) == ("cell", "ready")]
                num_ready.append(len(found))
    finally:
        stop.set()
        loader.join(timeout=120)
    assert progress.is_done
    assert answers
    assert all(answer == expected for answer in answers), answers
    assert min(num_ready) >= 1, "there was a time without a cell"
    deadline = time.monotonic() + 20
    while httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["policy"] != "smartspec":
        assert time.monotonic() < deadline, "front ends still tell of a former cell"
        time.sleep(0.2)
