"""What is said of workers whose processes do not come."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import placing


@pytest.mark.parametrize("has_seat", [True, False])
def test_who_reserves_nothing_is_given_time_before_it_is_called_late(
    has_seat: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On two cores drafters came after eleven seconds, and each start warned of a full cluster."""
    monkeypatch.setattr(placing, "CHECK_S", 0.01)
    monkeypatch.setattr(placing, "PATIENCE_S", 0.0)

    async def start() -> str:
        checks, came = 0, asyncio.Event()

        async def has_place(name: str) -> bool:
            nonlocal checks
            checks += 1
            if checks == 3:
                came.set()
            return True

        async def explain_seat(name: str) -> str:
            return "waiting"

        async def answer() -> str:
            await came.wait()
            return "here"

        reservations: Any = SimpleNamespace(
            has_seat=lambda name: has_seat, has_place=has_place, explain_seat=explain_seat
        )
        actor = SimpleNamespace(where=SimpleNamespace(remote=answer))
        worker: Any = SimpleNamespace(name="lookup", actors=[actor], where=[], waits_for="")
        async with placing.placing(worker, ["lookup"], reservations):
            pass
        return str(worker.where)

    for patience_s, is_late in ((60.0, has_seat), (0.0, True)):
        monkeypatch.setattr(placing, "PATIENCE_WITHOUT_SEAT_S", patience_s)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(start()) == "['here']"
        assert ("lookup is not running: waiting" in caplog.text) == is_late
