"""What is said of workers whose processes do not come."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import placing, reservation
from cluster.placement import Bundle, Plan
from cluster.placement_config import TargetPlacementConfig
from cluster.reservation import Reservations
from cluster.seats import Seat, Seats


def test_workers_are_given_time_before_they_are_called_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On two cores they came after eleven seconds, and each start warned of a full cluster."""
    monkeypatch.setattr(placing, "CHECK_S", 0.01)

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

        reservations: Any = SimpleNamespace(has_place=has_place, explain_seat=explain_seat)
        actor = SimpleNamespace(where=SimpleNamespace(remote=answer))
        worker: Any = SimpleNamespace(name="lookup", actors=[actor], where=[], waits_for="")
        async with placing.placing(worker, ["lookup"], reservations):
            pass
        return str(worker.where)

    for patience_s, is_late in ((60.0, False), (0.0, True)):
        monkeypatch.setattr(placing, "PATIENCE_S", patience_s)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(start()) == "['here']"
        assert ("lookup is not running: waiting" in caplog.text) == is_late


@pytest.mark.parametrize("node", ["here", "lost", ""])
def test_a_worker_whose_place_is_reserved_is_not_said_to_wait_for_cpus(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was: "waiting for 1 CPU; the cluster has 2 CPU: others may be using them", on an idle machine."""
    there = {"Alive": True, "NodeID": "here", "Resources": {"CPU": 2.0}, "Labels": {}}
    monkeypatch.setattr(reservation.ray, "nodes", lambda: [there])
    monkeypatch.setattr(
        reservation, "placement_group_table", lambda group: {"bundles_to_node_id": {0: node} if node else {}}
    )
    reserved = Reservations()
    plan = Plan(bundles=[Bundle({"CPU": 1.0}, seats=["rank"])])
    seat = Seat(SimpleNamespace(), plan, 0, TargetPlacementConfig(), False)
    reserved.take_over(Seats({"rank": seat}, [], []))
    told = asyncio.run(reserved.explain_seat("rank"))
    assert told.startswith("waiting for a process" if node == "here" else "waiting for 1 CPU for rank"), told
