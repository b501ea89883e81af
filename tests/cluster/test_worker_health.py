"""A worker that lives and does not end its call, over real sockets; and a scheduler that asks nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import FlotillaConfig
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.lifecycle import Life
from cluster.metric_set import MetricSet
from cluster.placement import rank_name
from cluster.recorded_core import make_core
from cluster.step_client import StepClient
from cluster.step_server import StepServer
from cluster.worker import VERIFIER, Worker
from cluster.worker_health import WorkerHealth
from deployments.demo import demo_config

TOKEN = b"secret"


def config() -> FlotillaConfig:
    raw = demo_config().model_dump() | {
        "health": {
            "heartbeat_s": 0.05,
            "silent_s": 0.5,
            "target_stuck_s": 0.3,
            "first_call_s": 0.6,
            "scheduler_stuck_s": 1.0,
        }
    }
    return FlotillaConfig.model_validate(raw)


class Cell:
    """The parts of a cell that are looked at: a scheduler, and a target of one rank behind a real port."""

    def __init__(self) -> None:
        self.config = config()
        self.core: Any = make_core(self.config, CostModel(DEFAULT_PROFILE))
        self.worker = Worker(VERIFIER, where=[("node", 1234)], is_loaded=True)
        self.life = Life(VERIFIER, None, state="ready")
        self.lost: list[str] = []
        self.metrics = MetricSet("cell")
        workers: Any = SimpleNamespace(workers={VERIFIER: self.worker})
        lifecycle: Any = SimpleNamespace(lives={VERIFIER: self.life}, lost=self.lost.append)
        shell: Any = self
        self.health = WorkerHealth(self.config, workers, lifecycle, shell, self.metrics)

    async def look(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(0.05)
            self.health.look(time.monotonic())

    def num_stalls(self, reason: str) -> float:
        (family,) = self.metrics.counter("flotilla_worker_stalls_total", "target", reason).collect()
        return float(family.samples[0].value)


async def test_a_call_that_does_not_end_is_stuck_although_the_process_lives() -> None:
    go_on = threading.Event()

    def answer(data: bytes) -> bytes:
        if data == b"hang":
            go_on.wait(20)
        return data

    server = StepServer(answer, TOKEN, "127.0.0.1", heartbeat_s=0.05)
    answers: list[bytes] = []
    cell = Cell()
    client = await StepClient.connect(rank_name(0), server.address, TOKEN, answers.append, lambda: None)
    cell.worker.connections.append(client)
    await cell.look(16)
    assert not cell.lost, "idle is not stuck"
    assert [one["state"] for one in cell.health.report(time.monotonic())] == ["ready"]
    client.send(b"quick")
    while not answers:
        await asyncio.sleep(0.005)
    client.send(b"hang")
    await cell.look(2)
    (report,) = cell.health.report(time.monotonic())
    assert (report["state"], report["process"], report["pid"]) == ("busy", rank_name(0), 1234)
    assert report["limit_s"] == pytest.approx(0.3)
    assert not cell.lost, "busy is not stuck"
    begun = time.monotonic()
    while not cell.lost:
        assert time.monotonic() - begun < 10
        await cell.look(1)
    assert cell.lost == [VERIFIER]
    assert (cell.num_stalls("stuck"), cell.num_stalls("silent")) == (1, 0)
    go_on.set()
    await client.close()
    server.close()


async def test_a_first_call_may_take_longer() -> None:
    go_on = threading.Event()
    server = StepServer(lambda data: (go_on.wait(20), data)[1], TOKEN, "127.0.0.1", heartbeat_s=0.05)
    cell = Cell()
    client = await StepClient.connect(rank_name(0), server.address, TOKEN, lambda _: None, lambda: None)
    cell.worker.connections.append(client)
    begun = time.monotonic()
    client.send(b"first")
    while not cell.lost:
        assert time.monotonic() - begun < 10
        await cell.look(1)
    assert time.monotonic() - begun >= 0.6
    go_on.set()
    await client.close()
    server.close()


async def test_no_signs_of_life_are_silence_and_one_loss_is_told_for_all_ranks() -> None:
    server = StepServer(lambda data: data, TOKEN, "127.0.0.1")  # sends none
    cell = Cell()
    for rank in range(2):
        other = server if rank == 0 else StepServer(lambda data: data, TOKEN, "127.0.0.1")
        connect = StepClient.connect(rank_name(rank), other.address, TOKEN, lambda _: None, lambda: None)
        cell.worker.connections.append(await connect)
    begun = time.monotonic()
    while not cell.lost:
        assert time.monotonic() - begun < 10
        await cell.look(1)
    assert time.monotonic() - begun >= 0.5
    assert cell.lost == [VERIFIER]
    assert cell.num_stalls("silent") == 1
    cell.life.state = "restarting"
    assert [one["state"] for one in cell.health.report(time.monotonic())] == ["lost"]
    for client in cell.worker.connections:
        await client.close()
    server.close()


def test_a_scheduler_that_waits_for_nobody_is_unhealthy_in_the_end() -> None:
    cell = Cell()
    outstanding: list[Any] = []
    cell.core = SimpleNamespace(
        requests={"one": object()},
        verifier=object(),
        verify_calls=SimpleNamespace(all_outstanding=outstanding),
        pool=SimpleNamespace(drafters={}),
    )
    cell.health.look(10.0)
    cell.health.check(10.9)
    outstanding.append(SimpleNamespace(predicted_s=0.1))
    cell.health.look(11.0)
    outstanding.clear()
    cell.health.look(11.5)
    cell.health.check(12.4)  # it was not without a call for all of that time
    with pytest.raises(RuntimeError, match="1 requests and has waited for nobody's answer for 1 s"):
        cell.health.check(12.5)
    cell.core.verifier = None  # the target is being replaced: then requests may wait
    cell.health.look(12.6)
    cell.health.check(99.0)
